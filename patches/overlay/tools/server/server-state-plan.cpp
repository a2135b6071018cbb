#include "server-state-plan.h"

#include <algorithm>
#include <iterator>
#include <utility>

const char * server_state_fate_name(server_state_fate fate) {
    switch (fate) {
        case SERVER_STATE_FATE_RESIDENT: return "resident";
        case SERVER_STATE_FATE_PARKED:   return "parked";
        case SERVER_STATE_FATE_PLACED:   return "placed";
        case SERVER_STATE_FATE_DROPPED:  return "dropped";
    }
    return "unknown";
}

const char * server_park_reason_name(server_park_reason reason) {
    switch (reason) {
        case SERVER_PARK_REASON_NONE:       return "none";
        case SERVER_PARK_REASON_N_SEQ:      return "n_seq";
        case SERVER_PARK_REASON_WINDOW:     return "window";
        case SERVER_PARK_REASON_POOL:       return "pool";
        case SERVER_PARK_REASON_DISPLACED:  return "displaced";
        case SERVER_PARK_REASON_NO_CONTEXT: return "no_context";
    }
    return "unknown";
}

namespace {

// hands out the slots, the window and the cells of the new geometry
struct assignment {
    const server_geometry & current;
    const server_geometry & next;

    std::vector<server_state_plan> states;

    std::vector<bool> taken; // by slot id
    int64_t           n_cells_left;

    assignment(const server_geometry & current, const server_geometry & next) :
        current(current), next(next), taken(next.n_seq, false), n_cells_left(next.kv_unified ? next.n_ctx : INT64_MAX) {}

    static void park(server_state_plan & state, server_park_reason reason, int64_t tokens_fit) {
        state.fate       = SERVER_STATE_FATE_PARKED;
        state.reason     = reason;
        state.tokens_fit = tokens_fit;
        state.id_slot    = -1;
    }

    void take(server_state_plan & state, server_state_fate fate, int32_t id_slot) {
        state.fate       = fate;
        state.reason     = SERVER_PARK_REASON_NONE;
        state.tokens_fit = 0;
        state.id_slot    = id_slot;

        taken[id_slot] = true;
        n_cells_left  -= state.load.n_need;
    }

    // a state in a slot: it stays where there is room for it
    void keep(server_state_load load) {
        // where the window does not shrink, what reaches its end is ended as it always was
        const bool shrinks = next.n_ctx_slot < current.n_ctx_slot;
        if (!shrinks) {
            load.n_need = std::min(load.n_need, std::max(load.n_tokens, next.n_ctx_slot));
        }

        states.push_back({});
        auto & state = states.back();
        state.load = load;

        if (load.id >= next.n_seq) {
            park(state, SERVER_PARK_REASON_N_SEQ, 0);
        } else if (shrinks && load.n_need > next.n_ctx_slot) {
            park(state, SERVER_PARK_REASON_WINDOW, next.n_ctx_slot);
        } else if (load.n_need > n_cells_left) {
            park(state, SERVER_PARK_REASON_POOL, std::max<int64_t>(0, n_cells_left));
        } else {
            take(state, SERVER_STATE_FATE_RESIDENT, load.id);
        }
    }

    // a displacement can give back more cells than it took
    void keep_after_all(server_state_plan & state) {
        if (state.fate == SERVER_STATE_FATE_PARKED && state.reason == SERVER_PARK_REASON_POOL &&
                !taken[state.load.id] && state.load.n_need <= n_cells_left) {
            take(state, SERVER_STATE_FATE_RESIDENT, state.load.id);
        }
    }

    // a parked state: parked on, until place() finds room for it
    void add_parked(server_state_load load) {
        // a window as large as the one it had holds it, even where it had come close to the end
        if (next.n_ctx_slot >= load.n_ctx_slot_home) {
            load.n_need = std::min(load.n_need, std::max(load.n_tokens, next.n_ctx_slot));
        }

        states.push_back({});
        auto & state = states.back();
        state.load       = load;
        state.was_parked = true;

        if (load.n_need > next.n_ctx_slot) {
            park(state, SERVER_PARK_REASON_WINDOW, next.n_ctx_slot);
        } else {
            park(state, SERVER_PARK_REASON_N_SEQ, 0);
        }
    }

    // into the slot that it came from, else into any that is free
    void place(server_state_plan & state, bool at_home) {
        if (state.fate != SERVER_STATE_FATE_PARKED || state.reason == SERVER_PARK_REASON_WINDOW) {
            return;
        }
        if (state.load.n_need > n_cells_left) {
            park(state, SERVER_PARK_REASON_POOL, std::max<int64_t>(0, n_cells_left));
            return;
        }

        const int32_t id_home = state.load.id_home;
        if (at_home) {
            if (id_home >= 0 && id_home < next.n_seq && !taken[id_home]) {
                take(state, SERVER_STATE_FATE_PLACED, id_home);
            }
            return;
        }

        const auto it = std::find(taken.begin(), taken.end(), false);
        if (it != taken.end()) {
            take(state, SERVER_STATE_FATE_PLACED, (int32_t) (it - taken.begin()));
        }
    }

    // a request that waits goes before a conversation that nobody is asking for: that one is parked in its place
    bool displace(server_state_plan & state) {
        if (state.fate != SERVER_STATE_FATE_PARKED || state.reason == SERVER_PARK_REASON_WINDOW) {
            return false;
        }

        // nobody has to go where the one before made room for two
        place(state, true);
        place(state, false);
        if (state.fate == SERVER_STATE_FATE_PLACED) {
            return true;
        }

        server_state_plan * victim = nullptr;
        for (auto & other : states) {
            const bool gives_room = other.fate == SERVER_STATE_FATE_RESIDENT && !other.load.running &&
                state.load.n_need <= n_cells_left + other.load.n_need;

            if (gives_room && (victim == nullptr || other.load.t_last_used_us < victim->load.t_last_used_us)) {
                victim = &other;
            }
        }
        if (victim == nullptr) {
            return false;
        }

        const int32_t id_slot = victim->id_slot;

        n_cells_left += victim->load.n_need;
        park(*victim, SERVER_PARK_REASON_DISPLACED, 0);
        take(state, SERVER_STATE_FATE_PLACED, id_slot);
        return true;
    }
};

}

std::vector<server_state_plan> server_state_assign(
        const std::vector<server_state_load> & slots,
        const std::vector<server_state_load> & parked,
        const server_geometry                & current,
        const server_geometry                & next) {
    assignment res(current, next);

    // where there is not room for all: running requests first, then what was used last
    std::vector<server_state_load> held;
    std::copy_if(slots.begin(), slots.end(), std::back_inserter(held), [](const auto & load) { return load.held(); });
    std::stable_sort(held.begin(), held.end(), [](const auto & a, const auto & b) {
        return a.running != b.running ? a.running : a.t_last_used_us > b.t_last_used_us;
    });

    for (const auto & load : held) {
        res.keep(load);
    }

    const size_t n_kept = res.states.size();
    for (const auto & load : parked) {
        res.add_parked(load);
    }

    for (const bool running : { true, false }) {
        const auto each = [&](auto && fn) {
            for (size_t i = n_kept; i < res.states.size(); ++i) {
                if (res.states[i].load.running == running) {
                    fn(res.states[i]);
                }
            }
        };

        each([&](server_state_plan & state) { res.place(state, true);  });
        each([&](server_state_plan & state) { res.place(state, false); });

        // one that found no room may find some after another one
        for (bool again = running; again; ) {
            again = false;
            each([&](server_state_plan & state) { again = res.displace(state) || again; });
        }
        if (running) {
            std::for_each(res.states.begin(), res.states.begin() + n_kept, [&](server_state_plan & state) { res.keep_after_all(state); });
        }
    }

    std::stable_sort(res.states.begin(), res.states.begin() + n_kept, [](const auto & a, const auto & b) { return a.load.id < b.load.id; });

    return std::move(res.states);
}
