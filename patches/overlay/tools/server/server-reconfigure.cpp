#include "server-reconfigure.h"

#include <algorithm>
#include <utility>

const char * server_reconfigure_outcome_name(server_reconfigure_outcome outcome) {
    switch (outcome) {
        case SERVER_RECONFIGURE_OUTCOME_APPLIED:   return "applied";
        case SERVER_RECONFIGURE_OUTCOME_UNCHANGED: return "unchanged";
        case SERVER_RECONFIGURE_OUTCOME_PLANNED:   return "planned";
        case SERVER_RECONFIGURE_OUTCOME_REFUSED:   return "refused";
    }
    return "unknown";
}

const char * server_reconfigure_reason_name(server_reconfigure_reason reason) {
    switch (reason) {
        case SERVER_RECONFIGURE_REASON_NONE:                    return "none";
        case SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY:        return "invalid_geometry";
        case SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE:       return "cache_type_change";
        case SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS:     return "fan_out_in_progress";
        case SERVER_RECONFIGURE_REASON_RECONFIGURE_IN_PROGRESS: return "reconfigure_in_progress";
        case SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED:         return "page_out_failed";
        case SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED:    return "context_build_failed";
        case SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY:     return "insufficient_memory";
        case SERVER_RECONFIGURE_REASON_MEDIA_HELD:              return "media_held";
        case SERVER_RECONFIGURE_REASON_ROPE_SCALING_CHANGE:     return "rope_scaling_change";
    }
    return "unknown";
}

int server_reconfigure_reason_status(server_reconfigure_reason reason) {
    switch (reason) {
        case SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY:     return 400;
        case SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED:      return 500;
        case SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED: return 503;
        default:                                             return 409;
    }
}

using details_t = std::map<std::string, int64_t>;

static server_reconfigure_result refuse(
        const server_geometry     & current,
        server_reconfigure_reason   reason,
        const std::string         & message,
        const details_t           & details = {}) {
    server_reconfigure_result res;
    res.outcome  = SERVER_RECONFIGURE_OUTCOME_REFUSED;
    res.reason   = reason;
    res.message  = message;
    res.details  = details;
    res.previous = current;

    // the message is what people read, so it has both numbers too
    const auto needed    = details.find("bytes_needed");
    const auto available = details.find("bytes_available");
    if (needed != details.end() && available != details.end()) {
        const auto to_mib = [](int64_t n_bytes) { return std::to_string(n_bytes / (1024*1024)) + " MiB"; };

        res.message += " (" + to_mib(needed->second) + " needed, " + to_mib(available->second) + " available)";
    }

    res.geometry = current;
    return res;
}

static bool holds_anything(const server_reconfigure_engine & engine) {
    const auto slots = engine.slots();

    return engine.limits().n_states_cached > 0 || !engine.parked().empty() ||
        std::any_of(slots.begin(), slots.end(), [](const auto & load) { return load.held(); });
}

// keys that were turned with one set of rope factors are wrong for the other one
static bool crosses_rope_switch(const server_geometry_limits & limits, const server_geometry & current, const server_geometry & next) {
    return limits.n_ctx_rope > 0 && (next.n_ctx_seq > limits.n_ctx_rope) != (current.n_ctx_seq > limits.n_ctx_rope);
}

// returns false and fills in `result` where a state is held that cannot be carried at all
// asked twice: the slots go on while the contexts are built
static bool admit(
        const server_reconfigure_engine & engine,
        const server_geometry           & current,
        const server_geometry           & next,
              server_reconfigure_result & result) {
    const auto limits = engine.limits();

    if (crosses_rope_switch(limits, current, next) && holds_anything(engine)) {
        result = refuse(current, SERVER_RECONFIGURE_REASON_ROPE_SCALING_CHANGE,
                "this model has other rope factors above " + std::to_string(limits.n_ctx_rope) + " cells for each sequence: the change from " +
                std::to_string(current.n_ctx_seq) + " to " + std::to_string(next.n_ctx_seq) + " drops every state that is held; 'force': true takes it",
                {{"n_ctx_seq", next.n_ctx_seq}, {"n_ctx_seq_switch", limits.n_ctx_rope}});
        return false;
    }

    if (limits.n_seq_waiting > next.n_seq && limits.n_seq_waiting <= current.n_seq) {
        result = refuse(current, SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS,
                "a completion with n = " + std::to_string(limits.n_seq_waiting) + " waits for its slots, which there would not be: try again when it has begun",
                {{"n_seq_needed", limits.n_seq_waiting}, {"n_seq", next.n_seq}});
        return false;
    }

    for (const auto & slot : engine.slots()) {
        if (slot.waits_for_parent) {
            result = refuse(current, SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS,
                    "a completion with n > 1 is being split over its slots: try again when its prompt has been processed",
                    {{"slot", slot.id}});
            return false;
        }
        if (slot.has_media) {
            result = refuse(current, SERVER_RECONFIGURE_REASON_MEDIA_HELD,
                    "slot " + std::to_string(slot.id) + " holds media, which cannot be moved", {{"slot", slot.id}});
            return false;
        }
    }
    return true;
}

static std::vector<server_state_plan> plan_states(
        const server_reconfigure_engine & engine,
        const server_reconfigure_plan   & plan,
        const server_geometry           & current) {
    const auto slots  = engine.slots();
    const auto parked = engine.parked();

    if (!plan.drop) {
        return server_state_assign(slots, parked, current, plan.next);
    }

    std::vector<server_state_plan> res;
    for (const auto * loads : { &slots, &parked }) {
        for (const auto & load : *loads) {
            if (load.held()) {
                res.push_back({});
                res.back().load       = load;
                res.back().fate       = SERVER_STATE_FATE_DROPPED;
                res.back().was_parked = loads == &parked;
            }
        }
    }
    return res;
}

//
// begin
//

bool server_reconfigure_begin(
        const server_reconfigure_engine & engine,
        const server_geometry_request   & request,
              server_reconfigure_plan   & plan,
              server_reconfigure_result & result) {
    const auto current = engine.geometry();
    const auto limits  = engine.limits();

    plan = {};
    plan.request  = request;
    plan.previous = current;

    const auto refused = [&](const server_reconfigure_result & res) {
        result = res;
        result.n_weight_loads = engine.n_weight_loads();
        return false;
    };

    server_geometry_error error;
    if (!server_geometry_resolve(current, limits, request, plan.next, error)) {
        return refused(refuse(current, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY, error.message, error.details));
    }

    const auto & next = plan.next;

    if (next == current && engine.serving()) {
        result = {};
        result.outcome        = SERVER_RECONFIGURE_OUTCOME_UNCHANGED;
        result.previous       = current;
        result.geometry       = current;
        result.n_weight_loads = engine.n_weight_loads();
        return false;
    }

    if (next.cache_type_k != current.cache_type_k || next.cache_type_v != current.cache_type_v) {
        if (!request.force) {
            return refused(refuse(current, SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE,
                    "a change of the KV cache types from " + current.cache_type_k + "/" + current.cache_type_v + " to " +
                    next.cache_type_k + "/" + next.cache_type_v + " drops every state that is held; 'force': true takes it"));
        }
        plan.drop = true;
    }

    // even where nothing is held yet: a slot may be by the time that the contexts are built
    plan.drop = plan.drop || (request.force && crosses_rope_switch(limits, current, next));

    if (!plan.drop && !admit(engine, current, next, result)) {
        return refused(result);
    }

    // the bookkeeping is touched by the build itself, and the buffers would be touched later: what cannot fit is not begun
    // (the exact sizes are checked after the build)
    const int64_t n_bytes_cells = next.n_ctx * limits.cell_bytes;
    const int64_t n_bytes_least = next.n_ctx * limits.cell_bytes_least;
    if (limits.memory_bytes > 0 && (n_bytes_cells > limits.memory_bytes || n_bytes_least > limits.memory_bytes + limits.reclaimable_bytes)) {
        return refused(refuse(current, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, "the new contexts would not fit in the memory that is left",
                {{"bytes_needed", std::max(n_bytes_cells, n_bytes_least)}, {"bytes_available", limits.memory_bytes}}));
    }

    return true;
}

//
// finish
//

namespace {

// one change at its safe point
struct change {
    server_reconfigure_engine      & engine;
    const server_reconfigure_plan  & plan;
    const server_reconfigure_build & built;

    const server_geometry current;
    const int64_t         t_start;

    server_reconfigure_result res;

    change(server_reconfigure_engine & engine, const server_reconfigure_plan & plan, const server_reconfigure_build & built) :
        engine(engine), plan(plan), built(built), current(engine.geometry()), t_start(engine.time_us()) {}

    // the serving contexts have everything
    server_reconfigure_result give_up(server_reconfigure_reason reason, const std::string & message, const details_t & details = {}) {
        engine.discard();
        engine.forget();

        auto refused = refuse(current, reason, message, details);
        refused.n_weight_loads = engine.n_weight_loads();
        return refused;
    }

    static std::string name_of(const server_state_plan & state) {
        return (state.was_parked ? "parked state " : "slot ") + std::to_string(state.load.id);
    }

    server_reconfigure_result give_up_on(const server_state_plan & state, const std::string & what, const std::string & error) {
        return give_up(SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
                "the state of " + name_of(state) + " could not be " + what + ", everything is as it was: " + error,
                {{"slot", state.load.id}, {"tokens_held", state.load.n_tokens}});
    }

    // what was parked and stays parked is not touched
    static bool is_carried(const server_state_plan & state) {
        return state.fate != SERVER_STATE_FATE_DROPPED && !(state.was_parked && state.fate == SERVER_STATE_FATE_PARKED);
    }

    // a parked state that cannot be placed after all loses nothing by staying where it is
    void stay_parked(server_state_plan & state) {
        res.n_tokens_held -= state.load.n_tokens;

        state.fate       = SERVER_STATE_FATE_PARKED;
        state.reason     = SERVER_PARK_REASON_POOL;
        state.tokens_fit = 0;
        state.id_slot    = -1;
    }

    bool count(const server_reconfigure_move & moved) {
        res.t_page_in_us += moved.t_in_us;
        res.n_bytes_held += moved.ok ? moved.n_bytes : 0;
        return moved.ok;
    }

    // memory that the states take which go out of their slots
    int64_t bytes_to_park() const {
        int64_t n = 0;
        for (const auto & state : res.states) {
            n += state.fate == SERVER_STATE_FATE_PARKED && !state.was_parked ? state.load.n_bytes : 0;
        }
        return n;
    }

    // memory of the new contexts that is written by the change itself
    int64_t bytes_to_fill() const {
        int64_t n = 0;
        for (const auto & state : res.states) {
            n += state.id_slot >= 0 ? state.load.n_bytes : 0;
        }
        return n;
    }

    server_reconfigure_result run() {
        if (!built.ok && !built.no_memory) {
            return give_up(SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED, "the new contexts could not be built, " +
                    std::string(engine.serving() ? "the old ones are serving: " : "nothing serves and every state is parked still: ") + built.error);
        }

        // the slots went on while the contexts were built
        if (!plan.drop && !admit(engine, current, plan.next, res)) {
            return give_up(res.reason, res.message, res.details);
        }

        res.previous       = plan.previous;
        res.geometry       = plan.next;
        res.bytes_needed   = built.bytes_needed;
        res.t_build_us     = built.t_us;
        res.t_prefault_us  = built.t_prefault_us;
        res.t_wait_us      = std::max<int64_t>(0, t_start - plan.request.t_us - built.t_us - built.t_prefault_us);
        res.n_weight_loads = engine.n_weight_loads();
        res.states         = plan_states(engine, plan, current);

        for (const auto & state : res.states) {
            res.n_tokens_held += is_carried(state) ? state.load.n_tokens : 0;
        }

        const auto    limits         = engine.limits();
        const int64_t n_bytes_park   = bytes_to_park();
        const int64_t n_bytes_needed = n_bytes_park + (built.ok ? built.host_bytes_needed : plan.next.n_ctx * limits.cell_bytes_kv);

        res.beside = built.ok && (limits.memory_bytes == 0 || n_bytes_needed <= limits.memory_bytes);

        const details_t numbers = {{"bytes_needed", n_bytes_needed}, {"bytes_available", limits.memory_bytes}};

        if (!res.beside) {
            if (limits.memory_bytes > 0 && n_bytes_needed > limits.memory_bytes + limits.reclaimable_bytes) {
                return give_up(SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
                        "the new contexts would not fit in the memory that is left once they are filled", numbers);
            }
            if (!engine.serving()) {
                return give_up(SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
                        "the new contexts do not fit in the memory that is left, nothing serves and every state is parked still", numbers);
            }
            // sequences that share cells would have cells of their own when the old geometry has to be rebuilt
            int64_t n_tokens = 0;
            int64_t n_bytes  = 0;
            for (const auto & load : engine.slots()) {
                n_tokens += load.n_tokens;
                n_bytes  += load.n_bytes;
            }
            if ((limits.memory_bytes > 0 && n_bytes > limits.memory_bytes) || (current.kv_unified && n_tokens > current.n_ctx)) {
                return give_up(SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
                        "the new contexts do not fit beside the old ones, and those cannot be let go first without the risk of losing a state", numbers);
            }
        }

        if (n_bytes_park > limits.page_bytes_left) {
            return give_up(SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
                    "what the new geometry has no place for takes more memory than is left for pages (--page-ram-bytes)",
                    {{"bytes_needed", n_bytes_park}, {"bytes_available", limits.page_bytes_left}});
        }

        if (plan.request.dry_run) {
            res.n_bytes_held = 0;
            for (const auto & state : res.states) {
                res.n_bytes_held += is_carried(state) ? state.load.n_bytes : 0;
            }
            res.outcome = SERVER_RECONFIGURE_OUTCOME_PLANNED;
            engine.discard();
            return std::move(res);
        }

        if (!engine.sync()) {
            return give_up(SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
                    "queued work on the KV cache could not be done, so the states cannot be captured");
        }

        res.t_sync_us = engine.time_us() - t_start;

        return res.beside ? run_beside() : run_released(limits, n_bytes_needed);
    }

    // the serving contexts keep every state until the built ones have it
    server_reconfigure_result run_beside() {
        const int64_t t_synced = engine.time_us();

        for (auto & state : res.states) {
            server_reconfigure_move moved;

            switch (state.fate) {
                case SERVER_STATE_FATE_RESIDENT: moved = engine.move(state.load.id);                 break;
                case SERVER_STATE_FATE_PLACED:   moved = engine.place(state.load.id, state.id_slot); break;
                case SERVER_STATE_FATE_PARKED:
                    if (state.was_parked) {
                        continue;
                    }
                    moved = engine.capture(state.load.id);
                    break;
                case SERVER_STATE_FATE_DROPPED:
                    continue;
            }

            if (count(moved)) {
                continue;
            }
            if (state.fate != SERVER_STATE_FATE_PLACED) {
                return give_up_on(state, state.fate == SERVER_STATE_FATE_PARKED ? "captured" : "moved", moved.error);
            }
            stay_parked(state);
        }

        const int64_t t_moved = engine.time_us();

        // what passed between the copies of single states belongs to the pause too
        res.t_page_out_us = (t_moved - t_synced) - res.t_page_in_us;

        std::string error;
        if (!engine.attach(plan.next, res.states, error)) {
            return give_up(SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
                    "what belongs to the running generations could not be attached to the new contexts: " + error);
        }

        commit(plan.next);

        return std::move(res);
    }

    void commit(const server_geometry & next) {
        const int64_t t_before = engine.time_us();

        engine.commit(next, res.states);

        const int64_t t_now = engine.time_us();

        res.outcome     = SERVER_RECONFIGURE_OUTCOME_APPLIED;
        res.t_swap_us   = t_now - t_before;
        res.t_attach_us = std::max<int64_t>(0, (t_now - t_start) - (res.t_pause_us() - res.t_attach_us));
    }

    // every state is captured, then the serving contexts make room
    server_reconfigure_result run_released(const server_geometry_limits & limits, int64_t n_bytes_needed) {
        engine.discard(); // what was built beside takes the memory

        const int64_t t_synced = engine.time_us();

        int64_t n_bytes_captured = 0;

        // what is to be dropped as well: should the new contexts fail, the old ones get it back
        for (const auto & state : res.states) {
            if (state.was_parked) {
                continue;
            }
            const auto moved = engine.capture(state.load.id);
            if (!moved.ok) {
                return give_up_on(state, "captured", moved.error);
            }
            n_bytes_captured += moved.n_bytes;
            res.n_bytes_held += is_carried(state) ? moved.n_bytes : 0;
        }

        const int64_t t_captured = engine.time_us();
        res.t_page_out_us = t_captured - t_synced;

        engine.release();

        const int64_t t_released = engine.time_us();
        res.t_release_us = t_released - t_captured;

        std::string error;
        std::string message = "the new contexts could not be built, the old ones were built again and are serving";
        auto        reason  = SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED;
        details_t   details;

        // what was captured has its memory already: it is parked there, or goes into the new contexts and is there twice until then
        const int64_t n_bytes_left = limits.memory_bytes > 0 ? engine.limits().memory_bytes : 0;
        const int64_t n_bytes_more = std::max(n_bytes_needed - n_bytes_captured, bytes_to_fill());

        if (n_bytes_left > 0 && n_bytes_more > n_bytes_left) {
            reason  = SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY;
            message = "the new contexts do not fit, even without the old ones, which were built again and are serving";
            details = {{"bytes_needed", n_bytes_more}, {"bytes_available", n_bytes_left}};
        } else if (rebuild(plan.next, res.states, error)) {
            commit(plan.next);
            return std::move(res);
        }

        // back: every state is in host memory
        auto states = res.states;
        for (auto & state : states) {
            state.fate       = state.was_parked ? SERVER_STATE_FATE_PARKED : SERVER_STATE_FATE_RESIDENT;
            state.reason     = SERVER_PARK_REASON_NONE;
            state.id_slot    = state.was_parked ? -1 : state.load.id;
        }

        std::string error_back;
        if (rebuild(current, states, error_back)) {
            engine.commit(current, states);

            auto refused = refuse(current, reason, message + (error.empty() ? "" : ": " + error), details);
            refused.n_weight_loads = engine.n_weight_loads();
            return refused;
        }

        for (auto & state : states) {
            state.fate       = SERVER_STATE_FATE_PARKED;
            state.reason     = state.was_parked ? state.reason : SERVER_PARK_REASON_NO_CONTEXT;
            state.tokens_fit = 0;
            state.id_slot    = -1;
        }
        engine.strand(states);

        auto refused = refuse(current, SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED,
                "neither the new contexts could be built nor the old ones again, so no slot serves; every state is parked in host memory. "
                "Make memory free or ask for a smaller geometry: POST /reconfigure builds it and places the states. "
                "New: " + (error.empty() ? "not enough memory" : error) + ". Old: " + error_back, details);
        refused.stranded       = true;
        refused.states         = states;
        refused.n_weight_loads = engine.n_weight_loads();
        return refused;
    }

    // contexts of a geometry, with the states that are to be in it; false: nothing was built
    bool rebuild(const server_geometry & geometry, std::vector<server_state_plan> & states, std::string & error) {
        const int64_t t_before = engine.time_us();
        const auto    made     = engine.build(geometry);
        const int64_t t_built  = engine.time_us();

        res.t_rebuild_us += t_built - t_before;
        res.bytes_needed  = made.bytes_needed;

        bool ok = made.ok;
        error = made.error;

        for (auto & state : states) {
            if (!ok) {
                break;
            }
            if (state.fate == SERVER_STATE_FATE_RESIDENT) {
                const auto moved = engine.restore(state.load.id);
                if (!moved.ok) {
                    ok    = false;
                    error = "the state of " + name_of(state) + " could not be restored: " + moved.error;
                }
            } else if (state.fate == SERVER_STATE_FATE_PLACED) {
                const auto moved = engine.place(state.load.id, state.id_slot);
                res.n_bytes_held += moved.ok ? moved.n_bytes : 0;
                if (!moved.ok) {
                    stay_parked(state);
                }
            }
        }

        res.t_page_in_us += engine.time_us() - t_built;

        ok = ok && engine.attach(geometry, states, error);
        if (!ok) {
            engine.discard();
        }
        return ok;
    }
};

}

server_reconfigure_result server_reconfigure_finish(
              server_reconfigure_engine & engine,
        const server_reconfigure_plan   & plan,
        const server_reconfigure_build  & build) {
    return change(engine, plan, build).run();
}
