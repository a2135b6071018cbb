#include "server-reconfigure.h"

#include <algorithm>

// libllama rounds the cells of a sequence up to this
static constexpr int64_t N_CTX_PAD = 256;

// positions are int32, and the sum over all sequences is an int32 in libllama's parameters
static constexpr int64_t N_CTX_MAX = INT32_MAX - N_CTX_PAD;

bool operator==(const server_geometry & a, const server_geometry & b) {
    return a.n_ctx        == b.n_ctx        &&
           a.n_seq        == b.n_seq        &&
           a.n_ctx_seq    == b.n_ctx_seq    &&
           a.n_ctx_slot   == b.n_ctx_slot   &&
           a.kv_unified   == b.kv_unified   &&
           a.cache_type_k == b.cache_type_k &&
           a.cache_type_v == b.cache_type_v;
}

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
    res.geometry = current;
    return res;
}

// the effective values that libllama and the server would make of n_ctx and n_seq
static void normalise(server_geometry & geometry, const server_geometry_limits & limits) {
    const auto pad = [](int64_t n) { return (n + N_CTX_PAD - 1) / N_CTX_PAD * N_CTX_PAD; };

    if (geometry.kv_unified) {
        geometry.n_ctx     = pad(geometry.n_ctx);
        geometry.n_ctx_seq = geometry.n_ctx;
    } else {
        geometry.n_ctx_seq = pad(pad(geometry.n_ctx) / geometry.n_seq);
        geometry.n_ctx     = geometry.n_ctx_seq * geometry.n_seq;
    }

    geometry.n_ctx_slot = std::min(geometry.n_ctx_seq, limits.n_ctx_train);
    if (limits.n_ctx_slot_max > 0) {
        geometry.n_ctx_slot = std::min(geometry.n_ctx_slot, limits.n_ctx_slot_max);
    }
}

// returns false and fills in `result` where the values make no geometry
static bool resolve(
        const server_geometry           & current,
        const server_geometry_limits    & limits,
        const server_geometry_request   & request,
              server_geometry           & next,
              server_reconfigure_result & result) {
    const auto invalid = [&](const std::string & message, const details_t & details) {
        result = refuse(current, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY, message, details);
        return false;
    };

    next = current;
    next.n_ctx      = request.n_ctx     .value_or(current.n_ctx);
    next.n_seq      = request.n_seq     .value_or(current.n_seq);
    next.kv_unified = request.kv_unified.value_or(current.kv_unified);

    if (next.n_ctx < 1 || next.n_ctx > N_CTX_MAX) {
        return invalid("n_ctx has to be between 1 and " + std::to_string(N_CTX_MAX),
                {{"n_ctx", next.n_ctx}, {"n_ctx_min", 1}, {"n_ctx_max", N_CTX_MAX}});
    }
    if (next.n_seq < 1 || next.n_seq > limits.n_seq_max) {
        return invalid("n_seq has to be between 1 and " + std::to_string(limits.n_seq_max),
                {{"n_seq", next.n_seq}, {"n_seq_min", 1}, {"n_seq_max", limits.n_seq_max}});
    }
    normalise(next, limits);

    if (next.n_ctx > N_CTX_MAX) {
        return invalid("n_ctx rounded up to " + std::to_string(N_CTX_PAD) + " cells for each sequence is above the maximum",
                {{"n_ctx", next.n_ctx}, {"n_ctx_max", N_CTX_MAX}});
    }

    // libllama limits a batch to n_ctx and aborts if it cannot hold one output for each sequence
    const int64_t n_batch = std::min(limits.n_batch, next.n_ctx);
    if (next.n_seq > n_batch) {
        return invalid("n_seq is above n_batch, the most sequences that one batch can serve",
                {{"n_seq", next.n_seq}, {"n_batch", n_batch}});
    }

    const bool type_k = request.cache_type_k.value_or(current.cache_type_k) != current.cache_type_k;
    const bool type_v = request.cache_type_v.value_or(current.cache_type_v) != current.cache_type_v;
    if (type_k || type_v) {
        result = refuse(current, SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE,
                "the KV cache types cannot be changed live: start the server again with --cache-type-k and --cache-type-v");
        return false;
    }

    return true;
}

// returns false and fills in `result` where the states held now cannot all go on in `next`
static bool admit(
        const server_reconfigure_engine & engine,
        const server_geometry           & current,
        const server_geometry           & next,
              server_reconfigure_result & result) {
    const auto slots = engine.slots();

    int64_t n_need_all = 0;

    for (const auto & slot : slots) {
        n_need_all += slot.n_need;

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
        if (slot.n_need > 0 && slot.id >= next.n_seq) {
            result = refuse(current, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY,
                    "slot " + std::to_string(slot.id) + " holds a conversation and would not exist with n_seq = " + std::to_string(next.n_seq) +
                    ": erase it first (POST /slots/" + std::to_string(slot.id) + "?action=erase)",
                    {{"slot", slot.id}, {"tokens_held", slot.n_tokens}, {"n_seq", next.n_seq}});
            return false;
        }
        // a need above the old window is answered as it always was: by the request's own error
        if (slot.n_need > next.n_ctx_slot && next.n_ctx_slot < current.n_ctx_slot) {
            result = refuse(current, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY,
                    "slot " + std::to_string(slot.id) + " needs " + std::to_string(slot.n_need) + " tokens, a slot would hold " +
                    std::to_string(next.n_ctx_slot),
                    {{"slot", slot.id}, {"tokens_held", slot.n_tokens}, {"tokens_needed", slot.n_need}, {"tokens_fit", next.n_ctx_slot}});
            return false;
        }
    }

    // sequences that share cells of a unified cache have cells of their own after the move
    if (next.kv_unified && n_need_all > next.n_ctx) {
        result = refuse(current, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY,
                "the slots need " + std::to_string(n_need_all) + " cells together, the unified cache would have " + std::to_string(next.n_ctx),
                {{"tokens_needed", n_need_all}, {"tokens_fit", next.n_ctx}});
        return false;
    }

    return true;
}

bool server_reconfigure_begin(
        const server_reconfigure_engine & engine,
        const server_geometry_request   & request,
              server_reconfigure_plan   & plan,
              server_reconfigure_result & result) {
    const auto current = engine.geometry();
    const auto limits  = engine.limits();

    plan.request      = request;
    plan.previous     = current;
    plan.t_request_us = engine.time_us();

    result.n_weight_loads = engine.n_weight_loads();

    if (!resolve(current, limits, request, plan.next, result)) {
        return false;
    }

    if (plan.next == current) {
        result = {};
        result.outcome        = SERVER_RECONFIGURE_OUTCOME_UNCHANGED;
        result.previous       = current;
        result.geometry       = current;
        result.n_weight_loads = engine.n_weight_loads();
        return false;
    }

    if (!admit(engine, current, plan.next, result)) {
        return false;
    }

    // these bytes are touched by the build itself, so they are checked before it; the buffers are checked after it
    const int64_t n_bytes_cells = plan.next.n_ctx * limits.cell_bytes;
    if (limits.memory_bytes > 0 && n_bytes_cells > limits.memory_bytes) {
        result = refuse(current, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
                "the bookkeeping of n_ctx cells alone does not fit in the memory that is left",
                {{"bytes_needed", n_bytes_cells}, {"bytes_available", limits.memory_bytes}});
        return false;
    }

    return true;
}

server_reconfigure_result server_reconfigure_finish(
              server_reconfigure_engine & engine,
        const server_reconfigure_plan   & plan,
        const server_reconfigure_build  & build) {
    const int64_t t_start = engine.time_us();

    const auto current = engine.geometry();

    const auto give_up = [&](server_reconfigure_result && res) {
        engine.discard();
        return std::move(res);
    };

    if (!build.ok) {
        return give_up(refuse(current, SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED,
                "the new contexts could not be built, the old ones are serving: " + build.error));
    }

    const auto limits = engine.limits();
    if (limits.memory_bytes > 0 && build.host_bytes_needed > limits.memory_bytes) {
        return give_up(refuse(current, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
                "the new contexts would not fit in the memory that is left once they are filled",
                {{"bytes_needed", build.host_bytes_needed}, {"bytes_available", limits.memory_bytes}}));
    }

    // the slots went on while the contexts were built
    server_reconfigure_result res;
    if (!admit(engine, current, plan.next, res)) {
        return give_up(std::move(res));
    }

    res.previous     = plan.previous;
    res.geometry     = plan.next;
    res.bytes_needed = build.bytes_needed;
    res.t_build_us     = build.t_us;
    res.t_prefault_us  = build.t_prefault_us;
    res.t_wait_us      = std::max<int64_t>(0, t_start - plan.t_request_us - build.t_us - build.t_prefault_us);
    res.n_weight_loads = engine.n_weight_loads();

    const auto slots = engine.slots();

    for (const auto & slot : slots) {
        if (slot.n_tokens > 0) {
            res.slots.push_back({ slot.id, slot.n_tokens });
            res.n_tokens_held += slot.n_tokens;
        }
    }

    if (plan.request.dry_run) {
        res.outcome = SERVER_RECONFIGURE_OUTCOME_PLANNED;
        return give_up(std::move(res));
    }

    if (!engine.sync()) {
        return give_up(refuse(current, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
                "queued work on the KV cache could not be done, so the states cannot be captured"));
    }

    const int64_t t_synced = engine.time_us();

    for (const auto & slot : res.slots) {
        const auto moved = engine.move(slot.id);
        if (!moved.ok) {
            return give_up(refuse(current, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
                    "the state of slot " + std::to_string(slot.id) + " could not be moved: " + moved.error,
                    {{"slot", slot.id}, {"tokens_held", slot.n_tokens}}));
        }

        res.n_bytes_held  += moved.n_bytes;
        res.t_page_out_us += moved.t_out_us;
        res.t_page_in_us  += moved.t_in_us;
    }

    const int64_t t_moved = engine.time_us();

    std::string error;
    if (!engine.attach(error)) {
        return give_up(refuse(current, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
                "what belongs to the running generations could not be attached to the new contexts: " + error));
    }

    const int64_t t_attached = engine.time_us();

    engine.commit(plan.next);

    res.outcome     = SERVER_RECONFIGURE_OUTCOME_APPLIED;
    res.t_sync_us   = t_synced   - t_start;
    res.t_attach_us = t_attached - t_moved;
    res.t_swap_us   = engine.time_us() - t_attached;

    // what passed between the copies of single slots belongs to the pause too
    res.t_page_out_us = (t_moved - t_synced) - res.t_page_in_us;

    return res;
}
