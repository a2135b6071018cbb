#include "server-reconfigure-http.h"

#include <cstdlib>
#include <sstream>
#include <stdexcept>

// a value as it was sent, as much of it as a person will read
static std::string shown(const json & value) {
    static const size_t N_MAX = 64;

    const std::string text = value.dump_safe();
    return text.size() <= N_MAX ? text : text.substr(0, N_MAX) + "...";
}

static int64_t parse_int(const std::string & key, const json & value) {
    const std::string text = value.dump_safe();

    if (!value.is_number_integer()) {
        throw std::invalid_argument("'" + key + "' has to be an integer, got " + shown(value));
    }

    // beyond int64 it is an integer all the same: the range check of the field answers it
    return strtoll(text.c_str(), nullptr, 10);
}

static bool parse_bool(const std::string & key, const json & value) {
    if (!value.is_boolean()) {
        throw std::invalid_argument("'" + key + "' has to be true or false, got " + shown(value));
    }
    return value.get<bool>();
}

static std::string parse_string(const std::string & key, const json & value) {
    if (!value.is_string()) {
        throw std::invalid_argument("'" + key + "' has to be a string, got " + shown(value));
    }
    return value.get<std::string>();
}

server_geometry_request server_reconfigure_parse(const std::string & body) {
    const json data = json::parse_no_throw(body);
    if (!data.is_object()) {
        throw std::invalid_argument("the body has to be a JSON object");
    }

    server_geometry_request res;
    for (const auto & [key, value] : data.items()) {
        if (key == "n_ctx") {
            res.n_ctx = parse_int(key, value);
        } else if (key == "n_seq") {
            res.n_seq = parse_int(key, value);
        } else if (key == "kv_unified") {
            res.kv_unified = parse_bool(key, value);
        } else if (key == "cache_type_k") {
            res.cache_type_k = parse_string(key, value);
        } else if (key == "cache_type_v") {
            res.cache_type_v = parse_string(key, value);
        } else if (key == "force") {
            res.force = parse_bool(key, value);
        } else if (key == "dry_run") {
            res.dry_run = parse_bool(key, value);
        } else if (key == "model") {
            parse_string(key, value); // the router has read it to find this process
        } else {
            throw std::invalid_argument("unknown field '" + key + "'");
        }
    }

    return res;
}

json server_geometry_to_json(const server_geometry & geometry) {
    return {
        {"n_ctx",        geometry.n_ctx},
        {"n_seq",        geometry.n_seq},
        {"n_ctx_seq",    geometry.n_ctx_seq},
        {"n_ctx_slot",   geometry.n_ctx_slot},
        {"kv_unified",   geometry.kv_unified},
        {"cache_type_k", geometry.cache_type_k},
        {"cache_type_v", geometry.cache_type_v},
    };
}

static json error_to_json(int status, const std::string & reason, const std::string & message, const json & details) {
    return {
        {"error", {
            {"code",    status},
            {"type",    "reconfigure_refused"},
            {"reason",  reason},
            {"message", message},
            {"details", details},
        }},
    };
}

json server_reconfigure_bad_request(const std::string & message) {
    const auto reason = SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY;

    return error_to_json(server_reconfigure_reason_status(reason), server_reconfigure_reason_name(reason), message, json::object());
}

int server_reconfigure_status(const server_reconfigure_result & result) {
    return result.outcome == SERVER_RECONFIGURE_OUTCOME_REFUSED ? server_reconfigure_reason_status(result.reason) : 200;
}

static double to_ms(int64_t t_us) {
    return t_us / 1000.0;
}

static json parked_to_json(const std::vector<server_state_plan> & states) {
    json res = json::array();

    for (const auto & state : states) {
        if (state.fate == SERVER_STATE_FATE_PARKED) {
            res.push_back({
                {"slot",        state.was_parked ? state.load.id_home : state.load.id},
                {"tokens_held", state.load.n_tokens},
                {"tokens_fit",  state.tokens_fit},
                {"reason",      server_park_reason_name(state.reason)},
                {"running",     state.load.running},
            });
        }
    }

    return res;
}

// the states that were carried or dropped; what was parked before and stays so is in "parked" only
static json slots_to_json(const std::vector<server_state_plan> & states) {
    json res = json::array();

    for (const auto & state : states) {
        if (state.was_parked && state.fate == SERVER_STATE_FATE_PARKED) {
            continue;
        }
        json slot = {
            {"slot",   state.id_slot >= 0 ? state.id_slot : state.was_parked ? state.load.id_home : state.load.id},
            {"tokens", state.load.n_tokens},
            {"fate",   server_state_fate_name(state.fate)},
        };
        if (state.fate == SERVER_STATE_FATE_PLACED) {
            slot["from"] = state.load.id_home;
        }
        res.push_back(std::move(slot));
    }

    return res;
}

static json phases_to_json(const server_reconfigure_result & result) {
    json res = {
        {"sync",               to_ms(result.t_sync_us)},
        {"page_out",           to_ms(result.t_page_out_us)},
        {"page_in",            to_ms(result.t_page_in_us)},
        {"swap",               to_ms(result.t_swap_us)},
        {"first_decode_setup", to_ms(result.t_attach_us)},
    };
    if (!result.beside) {
        res["release"] = to_ms(result.t_release_us);
        res["build"]   = to_ms(result.t_rebuild_us);
    }
    return res;
}

json server_reconfigure_to_json(const server_reconfigure_result & result) {
    if (result.outcome == SERVER_RECONFIGURE_OUTCOME_REFUSED) {
        json details = json::object();
        for (const auto & [key, value] : result.details) {
            details[key] = value;
        }
        if (result.stranded) {
            details["parked"] = parked_to_json(result.states);
        }
        return error_to_json(server_reconfigure_status(result), server_reconfigure_reason_name(result.reason), result.message, details);
    }

    json bytes_needed = json::object();
    for (const auto & [device, bytes] : result.bytes_needed) {
        bytes_needed[device] = bytes;
    }

    return {
        {"outcome",   server_reconfigure_outcome_name(result.outcome)},
        {"previous",  server_geometry_to_json(result.previous)},
        {"geometry",  server_geometry_to_json(result.geometry)},
        {"beside",    result.beside},
        {"pause_ms",  to_ms(result.t_pause_us())},
        {"phases_ms", phases_to_json(result)},
        {"outside_pause_ms", {
            {"wait",     to_ms(result.t_wait_us)},
            {"build",    to_ms(result.t_build_us)},
            {"prefault", to_ms(result.t_prefault_us)},
            {"free",     to_ms(result.t_free_us)},
        }},
        {"tokens_held",    result.n_tokens_held},
        {"bytes_held",     result.n_bytes_held},
        {"bytes_needed",   bytes_needed},
        {"slots",          slots_to_json(result.states)},
        {"parked",         parked_to_json(result.states)},
        {"n_weight_loads", result.n_weight_loads},
    };
}

//
// what is known from a snapshot
//

json server_live_parked_to_json(const server_live_info & live) {
    json res = json::array();

    for (const auto & parked : live.parked) {
        res.push_back({
            {"page",        parked.name},
            {"slot",        parked.id_slot},
            {"tokens_held", parked.n_tokens},
            {"tokens_fit",  parked.tokens_fit},
            {"reason",      server_park_reason_name(parked.reason)},
            {"running",     parked.running},
        });
    }

    return res;
}

json server_live_pages_to_json(const server_live_info & live, int64_t t_now_us) {
    json res = json::array();

    for (const auto & page : live.pages) {
        json item = {
            {"name",                page.name},
            {"n_tokens",            page.n_tokens},
            {"n_bytes",             page.n_bytes()},
            {"n_bytes_target",      page.n_bytes_target},
            {"n_bytes_draft",       page.n_bytes_draft},
            {"n_bytes_spec",        page.n_bytes_spec},
            {"n_bytes_checkpoints", page.n_bytes_checkpoints},
            {"n_checkpoints",       page.n_checkpoints},
            {"age_s",               (t_now_us - page.t_created_us) / 1e6},
            {"parked",              page.parked},
            {"running",             page.running},
        };
        for (const auto & parked : live.parked) {
            if (parked.name == page.name) {
                item["slot"]       = parked.id_slot;
                item["tokens_fit"] = parked.tokens_fit;
                item["reason"]     = server_park_reason_name(parked.reason);
            }
        }
        res.push_back(std::move(item));
    }

    return res;
}

std::string server_live_to_metrics(const server_live_info & live, const server_live_gauges & gauges) {
    std::ostringstream out;
    out.precision(15);

    const auto item = [&](const char * name, const char * type, const char * help, double value) {
        out << "# HELP llamacpp:" << name << " " << help << "\n"
            << "# TYPE llamacpp:" << name << " " << type << "\n"
            << "llamacpp:" << name << " " << value << "\n";
    };

    const auto & counters = live.counters;

    item("weight_loads_total",         "counter", "Times that the weights were loaded",                                  live.n_weight_loads);
    item("reconfigure_total",          "counter", "Changes of the geometry that were applied",                           counters.n_applied);
    item("reconfigure_refused_total",  "counter", "Changes that could not be taken",                                     counters.n_refused);
    item("reconfigure_failed_total",   "counter", "Changes that failed on the way, the old geometry went on",            counters.n_failed);
    item("reconfigure_dropped_total",  "counter", "States that a forced change dropped",                                 counters.n_dropped);
    item("parked_states",              "gauge",   "States that the geometry has no place for, kept in host memory",      live.parked.size());
    item("kv_cells_used",              "gauge",   "Tokens that the slots hold",                                          gauges.n_cells_used);
    item("kv_cells_total",             "gauge",   "Cells of the context",                                                live.serving ? live.geometry.n_ctx : 0);

    item("quiet",                      "gauge",   "Whether requests wait until POST /quiesce lets them start",           gauges.is_quiet);

    item("page_store_bytes",           "gauge",   "Bytes of host memory that pages take, parked states included",        gauges.n_bytes_pages);
    item("page_store_pages",           "gauge",   "Pages in host memory, parked states included",                        live.pages.size());
    item("page_out_total",             "counter", "Conversations that left their slot for a page",                       live.page_counters.n_out);
    item("page_in_total",              "counter", "Pages that went into a slot",                                         live.page_counters.n_in);
    item("page_spill_total",           "counter", "Pages that were written to files",                                     live.page_counters.n_spill);
    item("page_failed_total",          "counter", "Page actions that failed or found no room",                           live.page_counters.n_failed);

    item("ctx_checkpoint_bytes",       "gauge",   "Bytes of host memory that the slots' context checkpoints take",        gauges.n_bytes_checkpoints);
    item("ctx_checkpoints_evicted_budget_total", "counter", "Context checkpoints that were given up for the budget",     live.checkpoint_counters.n_evicted);
    item("ctx_checkpoints_skipped_budget_total", "counter", "Context checkpoints that were not made for the budget",     live.checkpoint_counters.n_skipped);

    const char * pause = "llamacpp:reconfigure_pause_seconds";

    out << "# HELP " << pause << " Time in which no token could be decoded, of each change\n"
        << "# TYPE " << pause << " histogram\n";

    uint64_t n_up_to = 0;
    for (size_t i = 0; i < SERVER_PAUSE_BUCKETS_S.size(); ++i) {
        n_up_to += counters.n_pauses[i];
        out << pause << "_bucket{le=\"" << SERVER_PAUSE_BUCKETS_S[i] << "\"} " << n_up_to << "\n";
    }
    // the braces are for readers that take every name without labels for a counter or a gauge
    out << pause << "_bucket{le=\"+Inf\"} " << counters.n_applied << "\n"
        << pause << "_sum{} " << counters.t_pause_us / 1e6 << "\n"
        << pause << "_count{} " << counters.n_applied << "\n";

    return out.str();
}
