#include "server-pages-http.h"

#include <cerrno>
#include <cstdlib>
#include <new>

// a slot that is used between the steps has to be measured again; it does not go on for ever
static constexpr int N_TRIES = 8;

bool server_page_is_action(const std::string & action) {
    return action == "page_out" || action == "page_in" || action == "page_drop";
}

static server_page_result refused(const server_page_request & request, server_page_reason reason, const std::string & message) {
    server_page_result res;
    res.reason  = reason;
    res.message = message;
    res.id_slot = request.id_slot;
    res.name    = request.name;
    return res;
}

static bool parse_slot(const std::string & text, int32_t & id_slot) {
    char * end = nullptr;

    errno = 0;
    const long value = strtol(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || errno != 0 || value < 0 || value > INT32_MAX) {
        return false;
    }

    id_slot = (int32_t) value;
    return true;
}

std::optional<server_page_result> server_page_handle(
        const std::string & id_slot,
        const std::string & action,
        const std::string & name,
        const std::function<std::optional<server_page_result>(const server_page_request &)> & run,
        const std::function<std::shared_ptr<server_page_base>(size_t n_bytes)>              & allocate) {
    server_page_request request;
    request.name = name;

    if (!parse_slot(id_slot, request.id_slot)) {
        return refused(request, SERVER_PAGE_REASON_BAD_SLOT, "the slot has to be a number, got '" + id_slot + "'");
    }

    // another verb is given the name of a page that there is, or is told that there is none
    const std::string error = action == "page_out" ? server_page_name_error(name) : name.empty() ? "the parameter 'page' names no page" : "";
    if (!error.empty()) {
        return refused(request, SERVER_PAGE_REASON_BAD_NAME, error);
    }

    if (action == "page_drop") {
        request.op = SERVER_PAGE_OP_DROP;
        return run(request);
    }

    const auto op = action == "page_out" ? SERVER_PAGE_OP_OUT : SERVER_PAGE_OP_IN;

    size_t n_bytes = 0; // of the state that will be captured: what goes out, or what a page in finds in its slot

    for (int i = 0; i < N_TRIES; ++i) {
        request.op   = SERVER_PAGE_OP_MEASURE;
        request.page = nullptr;

        const auto measured = run(request);
        if (!measured || measured->reason != SERVER_PAGE_REASON_NONE) {
            return measured;
        }

        n_bytes = measured->n_bytes_target + measured->n_bytes_draft;

        try {
            request.op   = op;
            request.page = allocate(n_bytes);
        } catch (const std::bad_alloc &) {
            return refused(request, SERVER_PAGE_REASON_CEILING, "there is no memory for " + std::to_string(n_bytes) + " bytes");
        }

        const auto done = run(request);
        if (!done || !done->retry) {
            return done;
        }
    }

    return refused(request, SERVER_PAGE_REASON_FAILED, "the slot is used again and again: nothing was changed");
}

json server_page_result_to_json(const server_page_result & result) {
    if (result.reason != SERVER_PAGE_REASON_NONE) {
        json details = json::object();
        for (const auto & [key, value] : result.details) {
            details[key] = value;
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

    json res = {
        {"id_slot",             result.id_slot},
        {"page",                result.name},
        {"n_tokens",            result.n_tokens},
        {"n_bytes",             result.n_bytes()},
        {"n_bytes_target",      result.n_bytes_target},
        {"n_bytes_draft",       result.n_bytes_draft},
        {"n_bytes_spec",        result.n_bytes_spec},
        {"n_bytes_checkpoints", result.n_bytes_checkpoints},
        {"n_checkpoints",       result.n_checkpoints},
        {"ms",                  result.t_us / 1000.0},
    };
    if (result.n_reusable >= 0) {
        res["n_reusable"] = result.n_reusable;
    }
    return res;
}
