#pragma once

// What other threads may know of the geometry, of parked states and of past changes: a snapshot that is replaced as a whole.

#include "server-reconfigure.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

// a conversation in host memory, under a name
struct server_page_info {
    std::string name;

    int64_t n_tokens            = 0;
    int64_t n_bytes_target      = 0;
    int64_t n_bytes_draft       = 0;
    int64_t n_bytes_spec        = 0;
    int64_t n_bytes_checkpoints = 0;
    int64_t n_checkpoints       = 0;

    bool parked  = false;
    bool running = false; // its request goes on when it is placed

    int64_t t_created_us = 0;

    int64_t n_bytes() const { return n_bytes_target + n_bytes_draft + n_bytes_spec + n_bytes_checkpoints; }
};

// why a page is one: a state that the geometry has no place for
struct server_parked_info {
    std::string name;

    int32_t id_slot  = -1; // the slot it was in
    int64_t n_tokens = 0;
    bool    running  = false;

    server_park_reason reason = SERVER_PARK_REASON_NONE;
    int64_t tokens_fit = 0;
};

struct server_page_counters {
    uint64_t n_out    = 0;
    uint64_t n_in     = 0;
    uint64_t n_spill  = 0;
    uint64_t n_failed = 0;
};

// for the sake of --ctx-checkpoints-bytes
struct server_checkpoint_counters {
    uint64_t n_evicted = 0;
    uint64_t n_skipped = 0; // not made
};

// upper bounds of the histogram of pauses
constexpr std::array<double, 11> SERVER_PAUSE_BUCKETS_S = { 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5 };

struct server_reconfigure_counters {
    uint64_t n_applied = 0;
    uint64_t n_refused = 0; // as they could not be taken
    uint64_t n_failed  = 0; // as something went wrong; the old geometry went on
    uint64_t n_dropped = 0; // states, by force

    std::array<uint64_t, SERVER_PAUSE_BUCKETS_S.size()> n_pauses {}; // up to each bound, not summed up

    int64_t t_pause_us = 0; // of all applied changes
};

struct server_live_info {
    server_geometry geometry;
    bool            serving = true; // false: no context, every state is parked

    int64_t n_weight_loads = 0;
    int64_t n_cells_asleep = 0; // tokens that the slots held when the model was unloaded last

    std::vector<server_parked_info> parked;
    server_reconfigure_counters     counters;

    std::vector<server_page_info> pages; // parked states too
    server_page_counters          page_counters;

    server_checkpoint_counters checkpoint_counters;

    std::shared_ptr<const server_reconfigure_result> last_reconfigure; // nullptr before the first one that was applied
};
