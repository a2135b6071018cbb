#include "server-reconfigure-http.h"

#include <cstdlib>
#include <stdexcept>

static int64_t parse_int(const std::string & key, const json & value) {
    const std::string text = value.dump_safe();

    if (!value.is_number_integer()) {
        throw std::invalid_argument("'" + key + "' has to be an integer, got " + text);
    }

    // beyond int64 it is an integer all the same: the range check of the field answers it
    return strtoll(text.c_str(), nullptr, 10);
}

static bool parse_bool(const std::string & key, const json & value) {
    if (!value.is_boolean()) {
        throw std::invalid_argument("'" + key + "' has to be true or false, got " + value.dump_safe());
    }
    return value.get<bool>();
}

static std::string parse_string(const std::string & key, const json & value) {
    if (!value.is_string()) {
        throw std::invalid_argument("'" + key + "' has to be a string, got " + value.dump_safe());
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

json server_reconfigure_to_json(const server_reconfigure_result & result) {
    if (result.outcome == SERVER_RECONFIGURE_OUTCOME_REFUSED) {
        json details = json::object();
        for (const auto & [key, value] : result.details) {
            details[key] = value;
        }
        return error_to_json(server_reconfigure_status(result), server_reconfigure_reason_name(result.reason), result.message, details);
    }

    json slots = json::array();
    for (const auto & slot : result.slots) {
        slots.push_back({{"slot", slot.id}, {"tokens", slot.n_tokens}, {"fate", "resident"}});
    }

    json bytes_needed = json::object();
    for (const auto & [device, bytes] : result.bytes_needed) {
        bytes_needed[device] = bytes;
    }

    return {
        {"outcome",  server_reconfigure_outcome_name(result.outcome)},
        {"previous", server_geometry_to_json(result.previous)},
        {"geometry", server_geometry_to_json(result.geometry)},
        {"pause_ms", to_ms(result.t_pause_us())},
        {"phases_ms", {
            {"sync",               to_ms(result.t_sync_us)},
            {"page_out",           to_ms(result.t_page_out_us)},
            {"page_in",            to_ms(result.t_page_in_us)},
            {"swap",               to_ms(result.t_swap_us)},
            {"first_decode_setup", to_ms(result.t_attach_us)},
        }},
        {"outside_pause_ms", {
            {"wait",     to_ms(result.t_wait_us)},
            {"build",    to_ms(result.t_build_us)},
            {"prefault", to_ms(result.t_prefault_us)},
        }},
        {"tokens_held",    result.n_tokens_held},
        {"bytes_held",     result.n_bytes_held},
        {"bytes_needed",   bytes_needed},
        {"slots",          slots},
        {"parked",         json::array()},
        {"n_weight_loads", result.n_weight_loads},
    };
}
