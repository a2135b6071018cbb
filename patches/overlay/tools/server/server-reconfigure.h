#pragma once

// The reconfigure logic: whether a new geometry can be taken, what becomes of every state that is held, and the order in
// which the states are carried into it.
//
// No JSON, no HTTP, no llama.h: all it needs of the engine is server_reconfigure_engine, so it is tested with a fake one.
// A change has two halves on the engine thread, with the build of the new contexts between them on any thread:
//
//   server_reconfigure_begin()  ->  engine.build()  ->  server_reconfigure_finish()
//
// Nothing that serves is touched before finish(). It ends in one of these:
//   - the new geometry serves, and every state is in it or parked by name
//   - the old geometry serves, and every state is where it was
//   - no geometry serves, because memory allows neither of the two any more, and every state is parked by name

#include "server-geometry.h"
#include "server-state-plan.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

enum server_reconfigure_outcome {
    SERVER_RECONFIGURE_OUTCOME_APPLIED,
    SERVER_RECONFIGURE_OUTCOME_UNCHANGED,
    SERVER_RECONFIGURE_OUTCOME_PLANNED,
    SERVER_RECONFIGURE_OUTCOME_REFUSED,
};

enum server_reconfigure_reason {
    SERVER_RECONFIGURE_REASON_NONE,
    SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY,
    SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE,
    SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS,
    SERVER_RECONFIGURE_REASON_RECONFIGURE_IN_PROGRESS,
    SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
    SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED,
    SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
    SERVER_RECONFIGURE_REASON_MEDIA_HELD,
    SERVER_RECONFIGURE_REASON_ROPE_SCALING_CHANGE,
};

const char * server_reconfigure_outcome_name(server_reconfigure_outcome outcome);
const char * server_reconfigure_reason_name (server_reconfigure_reason  reason);
int          server_reconfigure_reason_status(server_reconfigure_reason reason); // HTTP status

// the receipt of a change, or its refusal: everything is as it was then
struct server_reconfigure_result {
    server_reconfigure_outcome outcome = SERVER_RECONFIGURE_OUTCOME_REFUSED;

    // refused
    server_reconfigure_reason      reason = SERVER_RECONFIGURE_REASON_NONE;
    std::string                    message;
    std::map<std::string, int64_t> details;
    bool                           stranded = false; // no geometry serves: every state is parked

    server_geometry previous;
    server_geometry geometry;

    bool beside = true; // the new contexts were built while the old ones served; false: the old ones were let go first

    // the time in which no token could be decoded, and its parts
    int64_t t_sync_us     = 0;
    int64_t t_page_out_us = 0;
    int64_t t_release_us  = 0; // not beside: letting the old contexts go
    int64_t t_rebuild_us  = 0; // not beside: building the new ones
    int64_t t_page_in_us  = 0;
    int64_t t_attach_us   = 0;
    int64_t t_swap_us     = 0;

    int64_t t_pause_us() const {
        return t_sync_us + t_page_out_us + t_release_us + t_rebuild_us + t_page_in_us + t_attach_us + t_swap_us;
    }

    // beside decoding
    int64_t t_wait_us     = 0; // from the request to the safe point, the build and the prefault excluded
    int64_t t_build_us    = 0;
    int64_t t_prefault_us = 0;
    int64_t t_free_us     = 0; // letting the old contexts go after the change

    std::vector<server_state_plan> states; // that are held, in a slot or parked

    int64_t n_tokens_held = 0; // in states that were carried or would be
    int64_t n_bytes_held  = 0;

    std::map<std::string, int64_t> bytes_needed; // device -> bytes of the new contexts

    int64_t n_weight_loads = 0;
};

// a change that was begun: what finish() needs to know
struct server_reconfigure_plan {
    server_geometry_request request;
    server_geometry         previous;
    server_geometry         next;

    bool drop = false; // by force: what is held cannot be carried into the next geometry
};

struct server_reconfigure_build {
    bool        ok = false;
    bool        no_memory = false; // not ok: because an allocation failed, as far as it can be known
    std::string error;

    std::map<std::string, int64_t> bytes_needed; // device -> bytes
    int64_t host_bytes_needed = 0;               // of them, in host memory

    int64_t t_us          = 0;
    int64_t t_prefault_us = 0; // after the build: memory that the states will be copied into was made resident
};

struct server_reconfigure_move {
    bool        ok = false;
    std::string error;

    int64_t n_bytes = 0;
    int64_t t_in_us = 0; // of the time it took, that which went into the built contexts
};

// what the logic needs of the engine
struct server_reconfigure_engine {
    virtual ~server_reconfigure_engine() = default;

    virtual server_geometry                geometry() const = 0; // that serves, or served last
    virtual bool                           serving()  const = 0; // false: no contexts, after a failure to rebuild them
    virtual server_geometry_limits         limits()   const = 0;
    virtual std::vector<server_state_load> slots()    const = 0; // all of them, by ascending id
    virtual std::vector<server_state_load> parked()   const = 0; // in the order in which they were parked
    virtual int64_t                        time_us()  const = 0;
    virtual int64_t                        n_weight_loads() const = 0;

    // new contexts beside the ones that serve; may run on another thread while those decode
    virtual server_reconfigure_build build(const server_geometry & next) = 0;

    // wait for what is being computed and apply the memory work that is only queued; false: it could not be done
    virtual bool sync() = 0;

    // copy a state; where it comes from keeps it
    virtual server_reconfigure_move move   (int32_t id_slot) = 0;                    // a slot's from the serving into the built contexts
    virtual server_reconfigure_move capture(int32_t id_slot) = 0;                    // a slot's from the serving contexts into host memory
    virtual server_reconfigure_move restore(int32_t id_slot) = 0;                    // what capture() took into the built contexts
    virtual server_reconfigure_move place  (int32_t id_parked, int32_t id_slot) = 0; // a parked one into the built contexts

    // let the serving contexts go; everything in them has been captured
    virtual void release() noexcept = 0;

    // give the built contexts what belongs to running generations: samplers, speculative state
    virtual bool attach(const server_geometry & next, const std::vector<server_state_plan> & states, std::string & error) = 0;

    // the built contexts serve from here on, the previous ones are let go; slots and parked states become what `states` says
    virtual void commit(const server_geometry & next, const std::vector<server_state_plan> & states) noexcept = 0;

    // nothing serves any more: what was captured is parked
    virtual void strand(const std::vector<server_state_plan> & states) noexcept = 0;

    virtual void discard() noexcept = 0; // forget what was built
    virtual void forget()  noexcept = 0; // forget what was captured: the serving contexts have it
};

// check a request against what serves now; `plan` is filled in when it returns true: build plan.next, then call finish()
// otherwise `result` is the answer: refused or unchanged
bool server_reconfigure_begin(
        const server_reconfigure_engine & engine,
        const server_geometry_request   & request,
              server_reconfigure_plan   & plan,
              server_reconfigure_result & result);

// carry every state into what was built and make it serve
server_reconfigure_result server_reconfigure_finish(
              server_reconfigure_engine & engine,
        const server_reconfigure_plan   & plan,
        const server_reconfigure_build  & build);
