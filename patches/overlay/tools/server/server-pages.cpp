#include "server-pages.h"

#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

// a slot that is used between the steps has to be measured again; it does not go on for ever
static constexpr int N_TRIES = 8;

const char * server_page_reason_name(server_page_reason reason) {
    switch (reason) {
        case SERVER_PAGE_REASON_NONE:         return "none";
        case SERVER_PAGE_REASON_BAD_NAME:     return "bad_name";
        case SERVER_PAGE_REASON_BAD_SLOT:     return "bad_slot";
        case SERVER_PAGE_REASON_BAD_BODY:     return "bad_body";
        case SERVER_PAGE_REASON_EMPTY_SLOT:   return "empty_slot";
        case SERVER_PAGE_REASON_UNKNOWN_PAGE: return "unknown_page";
        case SERVER_PAGE_REASON_CEILING:      return "page_ceiling";
        case SERVER_PAGE_REASON_NO_MEMORY:    return "insufficient_memory";
        case SERVER_PAGE_REASON_TOO_LARGE:    return "too_large";
        case SERVER_PAGE_REASON_MISMATCH:     return "page_mismatch";
        case SERVER_PAGE_REASON_MEDIA_HELD:   return "media_held";
        case SERVER_PAGE_REASON_RUNNING:      return "request_waiting";
        case SERVER_PAGE_REASON_FAILED:       return "page_failed";
        case SERVER_PAGE_REASON_NO_FILE:      return "no_file";
        case SERVER_PAGE_REASON_BAD_FILE:     return "bad_file";
        case SERVER_PAGE_REASON_NO_SPACE:     return "no_space";
        case SERVER_PAGE_REASON_NO_ACCESS:    return "no_access";
        case SERVER_PAGE_REASON_FILES_FAILED: return "files_failed";
    }
    return "unknown";
}

int server_page_reason_status(server_page_reason reason) {
    switch (reason) {
        case SERVER_PAGE_REASON_NONE:         return 200;
        case SERVER_PAGE_REASON_BAD_NAME:
        case SERVER_PAGE_REASON_BAD_SLOT:
        case SERVER_PAGE_REASON_BAD_BODY:
        case SERVER_PAGE_REASON_EMPTY_SLOT:
        case SERVER_PAGE_REASON_NO_FILE:      // as llama-server has answered it from the first
        case SERVER_PAGE_REASON_BAD_FILE:     return 400;
        case SERVER_PAGE_REASON_UNKNOWN_PAGE: return 404;
        case SERVER_PAGE_REASON_CEILING:
        case SERVER_PAGE_REASON_NO_MEMORY:    return 503;
        case SERVER_PAGE_REASON_NO_SPACE:     return 507;
        case SERVER_PAGE_REASON_FAILED:
        case SERVER_PAGE_REASON_NO_ACCESS:
        case SERVER_PAGE_REASON_FILES_FAILED: return 500;
        default:                              return 409;
    }
}

server_page_result server_page_refused(
        const server_page_request            & request,
        server_page_reason                     reason,
        const std::string                    & message,
        const std::map<std::string, int64_t> & details) {
    server_page_result res;
    res.reason  = reason;
    res.message = message;
    res.details = details;
    res.id_slot = request.id_slot;
    res.name    = request.name;
    return res;
}

std::optional<server_page_result> server_page_slot_error(const std::string & id_slot, server_page_request & request) {
    const bool is_number = !id_slot.empty() && id_slot.find_first_not_of("0123456789") == std::string::npos;

    errno = 0;
    const long long value = is_number ? std::strtoll(id_slot.c_str(), nullptr, 10) : -1;
    if (errno != 0 || value < 0 || value > INT32_MAX) {
        return server_page_refused(request, SERVER_PAGE_REASON_BAD_SLOT, "the slot has to be a number, got '" + id_slot + "'");
    }

    request.id_slot = (int32_t) value;
    return std::nullopt;
}

server_page_result server_page_past_ceiling(const server_page_store & store, const server_page_request & request, int64_t n_bytes) {
    return server_page_refused(request, SERVER_PAGE_REASON_CEILING,
            "the state takes " + std::to_string(n_bytes) + " bytes, and " + std::to_string(store.used()) + " of " + std::to_string(store.limit()) +
            " (--page-ram-bytes) are used: drop or spill a page, or erase a slot that a page is to go into",
            {{"bytes_needed", n_bytes}, {"bytes_used", (int64_t) store.used()}, {"bytes_ceiling", (int64_t) store.limit()}});
}

// measure, make memory, do it; again where the slot was used between the steps
// `n_bytes` says how much of what was measured is charged for
static std::optional<server_page_result> with_memory(
        const server_page_steps & steps,
        server_page_request       request,
        const std::function<int64_t(const server_page_result &)>                           & n_bytes,
        const std::function<std::shared_ptr<server_page_charge>(size_t)>                   & reserve) {
    const auto op = request.op;

    for (int i = 0; i < N_TRIES; ++i) {
        request.op   = op == SERVER_PAGE_OP_IN ? SERVER_PAGE_OP_PREPARE : SERVER_PAGE_OP_MEASURE;
        request.page = nullptr; // and its charge

        const auto measured = steps.run(request);
        if (!measured || measured->reason != SERVER_PAGE_REASON_NONE) {
            return measured;
        }

        auto charge = reserve(n_bytes(*measured));
        if (!charge) {
            return server_page_past_ceiling(steps.store, request, n_bytes(*measured));
        }

        try {
            request.op   = op;
            request.page = steps.allocate(measured->n_bytes_state(), server_pace(measured->beside_decoding));
        } catch (const std::bad_alloc &) {
            return server_page_refused(request, SERVER_PAGE_REASON_NO_MEMORY, "there is no memory for " + std::to_string(measured->n_bytes_state()) + " bytes",
                    {{"bytes_needed", measured->n_bytes_state()}});
        }
        request.page->charge = std::move(charge);

        auto done = steps.run(request);
        if (!done || !done->retry) {
            if (done && op == SERVER_PAGE_OP_COPY) {
                done->held            = std::move(request.page);
                done->beside_decoding = measured->beside_decoding;
            }
            return done;
        }
    }

    return server_page_refused(request, SERVER_PAGE_REASON_FAILED, "the slot is used again and again: nothing was changed");
}

std::optional<server_page_result> server_page_out(const server_page_steps & steps, server_page_request request) {
    const std::string error = server_page_name_error(request.name);
    if (!error.empty()) {
        return server_page_refused(request, SERVER_PAGE_REASON_BAD_NAME, error);
    }

    request.op = SERVER_PAGE_OP_OUT;

    return with_memory(steps, request,
            [](const server_page_result & measured) { return measured.n_bytes(); },
            [&](size_t n) { return steps.store.reserve(request.name, n); });
}

// another verb than page_out is given the name of a page that there is, or is told that there is none
static std::optional<server_page_result> name_error(const server_page_request & request) {
    if (request.name.empty()) {
        return server_page_refused(request, SERVER_PAGE_REASON_BAD_NAME, "the parameter 'page' names no page");
    }
    return std::nullopt;
}

std::optional<server_page_result> server_page_in(const server_page_steps & steps, server_page_request request) {
    if (!request.source) {
        if (const auto error = name_error(request)) {
            return error;
        }
    }

    request.op = SERVER_PAGE_OP_IN;

    // what the slot holds is kept until the page is in
    return with_memory(steps, request,
            [](const server_page_result & measured) { return measured.n_tokens > 0 ? measured.n_bytes_state() : 0; },
            [&](size_t n) { return steps.store.reserve_passing(n); });
}

std::optional<server_page_result> server_page_drop(const server_page_steps & steps, server_page_request request) {
    if (const auto error = name_error(request)) {
        return error;
    }

    request.op = SERVER_PAGE_OP_DROP;

    return steps.run(request);
}

std::optional<server_page_result> server_page_hold(const server_page_steps & steps, server_page_request request) {
    if (const auto error = name_error(request)) {
        return error;
    }

    request.op = SERVER_PAGE_OP_HOLD;

    return steps.run(request);
}

std::optional<server_page_result> server_page_copy(const server_page_steps & steps, server_page_request request) {
    request.op          = SERVER_PAGE_OP_COPY;
    request.allow_media = true;

    return with_memory(steps, request,
            [](const server_page_result & measured) { return measured.n_bytes(); },
            [&](size_t n) { return steps.store.reserve_passing(n); });
}
