#pragma once

// What becomes of every state when the geometry changes: it stays in its slot, it is parked, or it is placed back. Pure.
//
// A state is parked when the new geometry has no slot, no window or no cells for it: it is kept whole in host memory, and a
// later change that has room for it places it back.

#include "server-geometry.h"

#include <cstdint>
#include <vector>

// a state in a slot or a parked one: what it holds, and what it needs to go on as if nothing had happened
struct server_state_load {
    int32_t id = -1; // of its slot, or its number among the parked ones

    int64_t n_tokens = 0; // held in its sequence
    int64_t n_need   = 0; // the window it needs
    int64_t n_bytes  = 0;

    int64_t t_last_used_us = 0;

    bool running          = false; // a request that has not ended waits for it
    bool waits_for_parent = false; // a child of an n > 1 completion whose prompt is still being processed
    bool has_media        = false;

    // of a parked state
    int32_t id_home         = -1; // the slot it was in
    int64_t n_ctx_slot_home = 0;  // the window it had there

    bool held() const { return n_tokens > 0 || running; }
};

enum server_state_fate {
    SERVER_STATE_FATE_RESIDENT, // stays in its slot
    SERVER_STATE_FATE_PARKED,
    SERVER_STATE_FATE_PLACED,   // was parked, goes into a slot
    SERVER_STATE_FATE_DROPPED,  // by force only
};

enum server_park_reason {
    SERVER_PARK_REASON_NONE,
    SERVER_PARK_REASON_N_SEQ,     // its slot does not exist
    SERVER_PARK_REASON_WINDOW,    // longer than what a slot can use
    SERVER_PARK_REASON_POOL,      // the unified cache has no cells for it beside the others
    SERVER_PARK_REASON_DISPLACED, // it was idle, and a running request that was parked needed a slot
    SERVER_PARK_REASON_NO_CONTEXT, // no context could be built
};

// what becomes of one state
struct server_state_plan {
    server_state_load  load;
    server_state_fate  fate = SERVER_STATE_FATE_RESIDENT;
    server_park_reason reason = SERVER_PARK_REASON_NONE; // parked: why
    int64_t            tokens_fit = 0;                   // parked: what there is room for
    int32_t            id_slot = -1;                     // resident, placed: where it is afterwards
    bool               was_parked = false;               // load.id is its number among the parked ones
};

const char * server_state_fate_name (server_state_fate  fate);
const char * server_park_reason_name(server_park_reason reason);

// what becomes of every state in `next`
std::vector<server_state_plan> server_state_assign(
        const std::vector<server_state_load> & slots,
        const std::vector<server_state_load> & parked,
        const server_geometry                & current,
        const server_geometry                & next);
