#pragma once

// The page verbs: what they are asked, what they answer, and their steps. No JSON, no llama.h.
//
// A verb takes steps on two threads: memory is made and files are written on the thread of the client, beside decoding; what
// touches a slot is done by the thread that runs the slots.

#include "server-pace.h"
#include "server-page-check.h"
#include "server-page-store.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

enum server_page_op {
    SERVER_PAGE_OP_MEASURE, // how much memory a page of the slot takes
    SERVER_PAGE_OP_PREPARE, // the same before IN, and what can be checked and done for it beside decoding
    SERVER_PAGE_OP_OUT,     // slot -> page, the slot is free afterwards
    SERVER_PAGE_OP_COPY,    // slot -> page of the caller, the slot goes on
    SERVER_PAGE_OP_IN,      // page -> slot, the page is gone afterwards
    SERVER_PAGE_OP_DROP,
    SERVER_PAGE_OP_HOLD,    // the caller owns the page too, from now on
};

enum server_page_reason {
    SERVER_PAGE_REASON_NONE,
    SERVER_PAGE_REASON_BAD_NAME,
    SERVER_PAGE_REASON_BAD_SLOT,
    SERVER_PAGE_REASON_BAD_BODY,
    SERVER_PAGE_REASON_EMPTY_SLOT,
    SERVER_PAGE_REASON_UNKNOWN_PAGE,
    SERVER_PAGE_REASON_CEILING,      // --page-ram-bytes
    SERVER_PAGE_REASON_NO_MEMORY,    // on the machine, or in its control group
    SERVER_PAGE_REASON_TOO_LARGE,    // for the slot, or for what is left of a unified cache
    SERVER_PAGE_REASON_MISMATCH,     // made for another model or another KV cache
    SERVER_PAGE_REASON_MEDIA_HELD,
    SERVER_PAGE_REASON_RUNNING,      // a parked state whose request has not ended
    SERVER_PAGE_REASON_FAILED,       // everything is as it was
    SERVER_PAGE_REASON_NO_FILE,
    SERVER_PAGE_REASON_BAD_FILE,     // it is there, but damaged or no page at all
    SERVER_PAGE_REASON_NO_SPACE,     // on the disk
    SERVER_PAGE_REASON_NO_ACCESS,    // to the directory or a file
    SERVER_PAGE_REASON_FILES_FAILED, // what else may happen to files; the message says which
};

const char * server_page_reason_name  (server_page_reason reason);
int          server_page_reason_status(server_page_reason reason); // HTTP status

struct server_page_request {
    server_page_op op = SERVER_PAGE_OP_MEASURE;

    int32_t     id_slot = -1;
    std::string name;

    std::shared_ptr<server_page_base> page;   // OUT, COPY: memory for the state, IN: for what the slot holds; made by the caller
    std::shared_ptr<server_page_base> source; // PREPARE, IN: the page, where it is not one of the store; DROP: this one only

    bool allow_media = false; // files can hold media, pages cannot

    int32_t id_home = -1; // OUT: not -1: the page is parked, a reconfigure that has room places it back, into this slot if it is free
};

struct server_page_result {
    server_page_reason                  reason = SERVER_PAGE_REASON_NONE; // none: it is done
    std::string                         message;
    std::map<std::string, int64_t>      details;
    std::vector<server_page_difference> differences; // MISMATCH

    bool retry = false; // OUT, COPY, IN: the memory that was given is too small by now, measure again

    int32_t     id_slot = -1;
    std::string name;

    int64_t n_tokens            = 0;
    int64_t n_bytes_target      = 0;
    int64_t n_bytes_draft       = 0;
    int64_t n_bytes_spec        = 0;
    int64_t n_bytes_checkpoints = 0;
    int64_t n_checkpoints       = 0;
    int64_t n_reusable          = -1; // IN: tokens that a request which goes on with the conversation will reuse

    int64_t t_us = 0; // on the thread that runs the slots

    // verbs with files
    int64_t                       t_total_us   = 0;
    int64_t                       n_bytes_file = 0; // of all files together
    std::string                   filename;
    std::vector<server_page_loss> losses;
    bool                          dropped = false;

    std::shared_ptr<server_page_base> held;        // HOLD, COPY: the page; others: what the caller may free beside decoding
    std::vector<uint8_t>              packed_spec; // HOLD, COPY: its speculative state as bytes

    std::vector<std::pair<std::string, float>> adapters; // HOLD, COPY: its active adapters, by fingerprint

    bool beside_decoding = false; // MEASURE, PREPARE, HOLD: a slot is processing, so what is done on another thread has time

    int64_t n_bytes_state() const { return n_bytes_target + n_bytes_draft; }
    int64_t n_bytes()       const { return n_bytes_state() + n_bytes_spec + n_bytes_checkpoints; }
};

server_page_result server_page_refused(
        const server_page_request            & request,
        server_page_reason                     reason,
        const std::string                    & message,
        const std::map<std::string, int64_t> & details = {});

// with the numbers
server_page_result server_page_past_ceiling(const server_page_store & store, const server_page_request & request, int64_t n_bytes);

// what a verb needs of its surroundings
struct server_page_steps {
    server_page_store & store;

    // have a step done by the thread that runs the slots and wait for it: nullopt, the client is gone or was answered
    std::function<std::optional<server_page_result>(const server_page_request &)> run;

    // an empty page with resident memory for a state of n_bytes; throws std::bad_alloc
    std::function<std::shared_ptr<server_page_base>(size_t n_bytes, server_pace pace)> allocate;
};

// a slot by its number, as a client writes it
std::optional<server_page_result> server_page_slot_error(const std::string & id_slot, server_page_request & request);

// for page_in `source` may be a page that is not in the store
std::optional<server_page_result> server_page_out (const server_page_steps & steps, server_page_request request);
std::optional<server_page_result> server_page_in  (const server_page_steps & steps, server_page_request request);
std::optional<server_page_result> server_page_drop(const server_page_steps & steps, server_page_request request);

// what is to be written into files, in `held`: a page of the store, or a copy of what a slot holds
std::optional<server_page_result> server_page_hold(const server_page_steps & steps, server_page_request request);
std::optional<server_page_result> server_page_copy(const server_page_steps & steps, server_page_request request);
