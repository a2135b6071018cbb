#pragma once

// The page verbs: what they are asked, and what they answer. No JSON, no llama.h.

#include "server-page-store.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

enum server_page_op {
    SERVER_PAGE_OP_MEASURE, // how much memory a page of the slot takes: for who will allocate it
    SERVER_PAGE_OP_OUT,     // slot -> page, the slot is free afterwards
    SERVER_PAGE_OP_IN,      // page -> slot, the page is gone afterwards
    SERVER_PAGE_OP_DROP,
};

enum server_page_reason {
    SERVER_PAGE_REASON_NONE,
    SERVER_PAGE_REASON_BAD_NAME,
    SERVER_PAGE_REASON_BAD_SLOT,
    SERVER_PAGE_REASON_EMPTY_SLOT,
    SERVER_PAGE_REASON_UNKNOWN_PAGE,
    SERVER_PAGE_REASON_CEILING,      // --page-ram-bytes
    SERVER_PAGE_REASON_TOO_LARGE,    // for the slot, or for what is left of a unified cache
    SERVER_PAGE_REASON_MISMATCH,     // made for another model or another KV cache
    SERVER_PAGE_REASON_MEDIA_HELD,
    SERVER_PAGE_REASON_RUNNING,      // a parked state whose request has not ended
    SERVER_PAGE_REASON_FAILED,       // everything is as it was
};

const char * server_page_reason_name  (server_page_reason reason);
int          server_page_reason_status(server_page_reason reason); // HTTP status

struct server_page_request {
    server_page_op op = SERVER_PAGE_OP_MEASURE;

    int32_t     id_slot = -1;
    std::string name;

    std::shared_ptr<server_page_base> page; // OUT: memory for the state, IN: for what the slot holds; made by the caller
};

struct server_page_result {
    server_page_reason             reason = SERVER_PAGE_REASON_NONE; // none: it is done
    std::string                    message;
    std::map<std::string, int64_t> details;

    bool retry = false; // OUT, IN: the memory that was given is too small by now, measure again

    int32_t     id_slot = -1;
    std::string name;

    int64_t n_tokens            = 0;
    int64_t n_bytes_target      = 0;
    int64_t n_bytes_draft       = 0;
    int64_t n_bytes_spec        = 0;
    int64_t n_bytes_checkpoints = 0;
    int64_t n_checkpoints       = 0;
    int64_t n_reusable          = -1; // IN: tokens that a request which goes on with the conversation will reuse

    int64_t t_us = 0; // on the engine thread

    int64_t n_bytes() const { return n_bytes_target + n_bytes_draft + n_bytes_spec + n_bytes_checkpoints; }
};
