#include "server-pages-http.h"

#include "server-faults.h"
#include "server-pages-disk.h"

#include <cstdlib>

bool server_page_is_action(const std::string & action) {
    return action == "page_out" || action == "page_in" || action == "page_drop" || server_page_has_files(action);
}

bool server_page_has_files(const std::string & action) {
    return action == "spill" || action == "save" || action == "restore";
}

static json parse_object(const std::string & body) {
    const json res = json::parse_no_throw(body);
    if (!res.is_object()) {
        throw std::invalid_argument("the body has to be a JSON object");
    }
    return res;
}

// what a body may say
struct file_body {
    std::string filename;
    bool        drop = false;
};

static file_body parse_body(const server_page_words & words) {
    const bool is_spill = words.action == "spill";

    file_body res;

    if (words.body.empty() && is_spill) {
        res.filename = words.page;
        return res;
    }

    const json body = parse_object(words.body);

    if (body.contains("filename")) {
        if (!body.at("filename").is_string()) {
            throw std::invalid_argument("'filename' has to be a string");
        }
        res.filename = body.at("filename").get<std::string>();
    } else if (is_spill) {
        res.filename = words.page;
    } else {
        throw std::invalid_argument("'filename' is missing");
    }

    if (is_spill && body.contains("drop")) {
        if (!body.at("drop").is_boolean()) {
            throw std::invalid_argument("'drop' has to be true or false");
        }
        res.drop = body.at("drop").get<bool>();
    }

    return res;
}

// the slot that a page is parked for, -1: it is not parked
static int32_t parse_home(const server_page_words & words) {
    if (words.body.empty()) {
        return -1;
    }

    const json body = parse_object(words.body);
    if (!body.contains("home")) {
        return -1;
    }

    // beyond int64 it is an integer all the same, and no slot
    const auto    & home = body.at("home");
    const long long slot = home.is_number_integer() ? strtoll(home.dump_safe().c_str(), nullptr, 10) : -1;
    if (slot < 0 || slot > INT32_MAX) {
        throw std::invalid_argument("'home' has to be the number of a slot");
    }

    return (int32_t) slot;
}

static std::optional<server_page_result> spill(const server_page_steps & steps, const std::string & dir, server_page_request request, const file_body & body) {
    auto held = server_page_hold(steps, request);
    if (!held || held->reason != SERVER_PAGE_REASON_NONE) {
        return held;
    }

    auto res = server_page_save(dir, body.filename, std::move(*held));

    if (res.reason == SERVER_PAGE_REASON_NONE && body.drop) {
        // this page, not one that has taken its name meanwhile
        request.source = res.held;

        const auto dropped = server_page_drop(steps, request);
        res.dropped = dropped && dropped->dropped;
    }

    return res;
}

static std::optional<server_page_result> save(const server_page_steps & steps, const std::string & dir, const server_page_request & request) {
    auto held = server_page_copy(steps, request);
    if (!held || held->reason != SERVER_PAGE_REASON_NONE) {
        return held;
    }

    return server_page_save(dir, request.name, std::move(*held));
}

static std::optional<server_page_result> restore(const server_page_steps & steps, const std::string & dir, server_page_request request) {
    request.allow_media = true;

    // a slot that is not there costs no reading
    const auto measured = steps.run(request);
    if (!measured || measured->reason != SERVER_PAGE_REASON_NONE) {
        return measured;
    }

    auto loaded = server_page_load(dir, steps.store, request, server_pace(measured->beside_decoding));
    if (loaded.reason != SERVER_PAGE_REASON_NONE) {
        return loaded;
    }

    request.source = std::move(loaded.held);

    auto res = server_page_in(steps, request);
    if (res) {
        res->n_bytes_file = loaded.n_bytes_file;
        res->filename     = request.name;
    }
    return res;
}

std::optional<server_page_result> server_page_handle(const server_page_steps & steps, const std::string & save_path, const server_page_words & words) {
    const int64_t t_start = ggml_time_us();

    server_faults_begin();

    server_page_request request;
    request.name = words.page;

    if (auto error = server_page_slot_error(words.id_slot, request)) {
        return error;
    }

    if (words.action == "page_out") {
        try {
            request.id_home = parse_home(words);
        } catch (const std::invalid_argument & e) {
            return server_page_refused(request, SERVER_PAGE_REASON_BAD_BODY, e.what());
        }
        return server_page_out(steps, request);
    }
    if (words.action == "page_in") {
        return server_page_in(steps, request);
    }
    if (words.action == "page_drop") {
        return server_page_drop(steps, request);
    }

    file_body body;
    try {
        body = parse_body(words);
    } catch (const std::invalid_argument & e) {
        return server_page_refused(request, SERVER_PAGE_REASON_BAD_BODY, e.what());
    }

    if (const auto error = server_page_file_name_error(body.filename); !error.empty()) {
        return server_page_refused(request, SERVER_PAGE_REASON_BAD_NAME, "Invalid filename: " + error);
    }

    if (words.action != "spill") {
        request.name = body.filename;
    }

    // the option's value ends in a slash, for llama-server's own use
    const std::string dir = save_path.substr(0, save_path.find_last_not_of("/\\") + 1);

    auto res = words.action == "spill"   ? spill  (steps, dir, request, body) :
               words.action == "save"    ? save   (steps, dir, request) :
                                           restore(steps, dir, request);
    if (res) {
        res->t_total_us = ggml_time_us() - t_start;
    }
    return res;
}

static json error_to_json(const server_page_result & result) {
    json details = json::object();
    for (const auto & [key, value] : result.details) {
        details[key] = value;
    }

    if (!result.differences.empty()) {
        details["fields"] = json::array();
        for (const auto & d : result.differences) {
            details["fields"].push_back({ {"field", d.field}, {"page", d.page}, {"server", d.server} });
        }
    }

    return {
        {"error", {
            {"code",    server_page_reason_status(result.reason)},
            {"type",    "page_refused"},
            {"reason",  server_page_reason_name(result.reason)},
            {"message", result.message},
            {"details", details},
        }},
    };
}

json server_page_result_to_json(const std::string & action, const server_page_result & result) {
    if (result.reason != SERVER_PAGE_REASON_NONE) {
        return error_to_json(result);
    }

    json res = {
        {"id_slot",             result.id_slot},
        {"n_tokens",            result.n_tokens},
        {"n_bytes",             result.n_bytes()},
        {"n_bytes_target",      result.n_bytes_target},
        {"n_bytes_draft",       result.n_bytes_draft},
        {"n_bytes_spec",        result.n_bytes_spec},
        {"n_bytes_checkpoints", result.n_bytes_checkpoints},
        {"n_checkpoints",       result.n_checkpoints},
    };
    if (result.n_reusable >= 0) {
        res["n_reusable"] = result.n_reusable;
    }

    if (!server_page_has_files(action)) {
        res["page"] = result.name;
        res["ms"]   = result.t_us / 1000.0;
        return res;
    }

    res["filename"] = result.filename;

    if (action == "spill") {
        res["page"]      = result.name;
        res["n_written"] = result.n_bytes_file;
        res["dropped"]   = result.dropped;
        res["ms"]        = result.t_total_us / 1000.0;
        return res;
    }

    // as llama-server answers
    const bool is_save = action == "save";
    res[is_save ? "n_saved"   : "n_restored"] = result.n_tokens;
    res[is_save ? "n_written" : "n_read"]     = result.n_bytes_file;
    res["timings"] = {
        {is_save ? "save_ms" : "restore_ms", result.t_total_us / 1000.0},
        {"engine_ms", result.t_us / 1000.0},
    };

    if (!is_save) {
        res["lost"] = json::array();
        for (const auto & loss : result.losses) {
            res["lost"].push_back({ {"file", result.filename + loss.suffix}, {"why", loss.why} });
        }
    }

    return res;
}
