// sources: server-state-plan.cpp

// What becomes of every state when the geometry changes: who stays, who is parked and why, who comes back and where.

#include "server-state-plan.h"
#include "testing.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>

using loads = std::vector<server_state_load>;
using plans = std::vector<server_state_plan>;

static server_geometry window_of(int64_t n_ctx_slot, int64_t n_seq) {
    server_geometry res;
    res.n_ctx      = n_ctx_slot * n_seq;
    res.n_seq      = n_seq;
    res.n_ctx_seq  = n_ctx_slot;
    res.n_ctx_slot = n_ctx_slot;
    return res;
}

static server_geometry pool_of(int64_t n_ctx, int64_t n_seq, int64_t n_ctx_slot) {
    server_geometry res = window_of(n_ctx_slot, n_seq);
    res.n_ctx      = n_ctx;
    res.n_ctx_seq  = n_ctx;
    res.kv_unified = true;
    return res;
}

// a conversation that nobody is asking for
static server_state_load idle(int32_t id, int64_t n_tokens, int64_t t_last_used_us = 0) {
    server_state_load res;
    res.id             = id;
    res.n_tokens       = n_tokens;
    res.n_need         = n_tokens;
    res.t_last_used_us = t_last_used_us;
    return res;
}

static server_state_load running(int32_t id, int64_t n_tokens, int64_t t_last_used_us = 0) {
    server_state_load res = idle(id, n_tokens, t_last_used_us);
    res.running = true;
    res.n_need  = n_tokens + 2;
    return res;
}

static server_state_load from(int32_t id_home, int64_t n_ctx_slot_home, server_state_load load) {
    load.id_home         = id_home;
    load.n_ctx_slot_home = n_ctx_slot_home;
    return load;
}

// one line: "resident 0", "parked 1 window 2048" (what fits), "7 placed 1", "7 parked pool 10"; what was parked begins with its number
static std::string told(const plans & states) {
    std::ostringstream res;
    for (const auto & state : states) {
        res << (&state == &states.front() ? "" : ", ");
        if (state.was_parked) {
            res << state.load.id << " ";
        }
        res << server_state_fate_name(state.fate);
        if (state.fate != SERVER_STATE_FATE_PARKED) {
            res << " " << state.id_slot;
            continue;
        }
        CHECK_EQ(state.id_slot, -1);
        if (!state.was_parked) {
            res << " " << state.load.id;
        }
        res << " " << server_park_reason_name(state.reason) << " " << state.tokens_fit;
    }
    return res.str();
}

static std::string assigned(const loads & slots, const loads & parked, const server_geometry & current, const server_geometry & next) {
    return told(server_state_assign(slots, parked, current, next));
}

TEST(names_are_those_of_the_receipt) {
    std::string names;
    for (int i = 0; i <= SERVER_STATE_FATE_DROPPED + 1; ++i) {
        names += std::string(" ") + server_state_fate_name((server_state_fate) i);
    }
    CHECK_EQ(names, " resident parked placed dropped unknown");

    names = "";
    for (int i = 0; i <= SERVER_PARK_REASON_NO_CONTEXT + 1; ++i) {
        names += std::string(" ") + server_park_reason_name((server_park_reason) i);
    }
    CHECK_EQ(names, " none n_seq window pool displaced no_context unknown");
}

TEST(what_holds_nothing_is_no_state) {
    CHECK_EQ(assigned({ idle(0, 0), running(1, 0), idle(2, 0) }, {}, window_of(4096, 3), window_of(4096, 2)), "resident 1");
}

TEST(a_slot_that_is_gone_is_parked_whatever_it_holds) {
    CHECK_EQ(assigned({ idle(0, 10), running(1, 20), idle(2, 30), running(3, 4000) }, {}, window_of(4096, 4), window_of(8192, 2)),
            "resident 0, resident 1, parked 2 n_seq 0, parked 3 n_seq 0");
}

TEST(a_state_longer_than_the_window_is_parked_at_the_token) {
    CHECK_EQ(assigned({ idle(0, 2048), idle(1, 2049) },       {}, window_of(4096, 2), window_of(2048, 2)), "resident 0, parked 1 window 2048");
    CHECK_EQ(assigned({ running(0, 2046), running(1, 2047) }, {}, window_of(4096, 2), window_of(2048, 2)), "resident 0, parked 1 window 2048");
}

TEST(a_window_that_does_not_shrink_parks_nothing) {
    // at its end, and a prompt that is longer than it: they are ended as they always were
    loads slots = { running(0, 4095), running(1, 4096), running(2, 100) };
    slots[2].n_need = 100000;

    for (const auto & next : { window_of(4096, 3), window_of(8192, 3), window_of(4096, 5) }) {
        const auto states = server_state_assign(slots, {}, window_of(4096, 3), next);
        CHECK_EQ(told(states), "resident 0, resident 1, resident 2");
        CHECK_EQ(states[2].load.n_need, next.n_ctx_slot);
    }
    CHECK_EQ(assigned(slots, {}, window_of(4096, 3), pool_of(12288, 3, 4096)), "resident 0, resident 1, resident 2");
}

TEST(a_pool_holds_the_sum_of_the_needs) {
    const loads slots = { idle(0, 1000), idle(1, 1000), idle(2, 1000) };

    CHECK_EQ(assigned(slots, {}, pool_of(8192, 3, 8192), pool_of(3000, 3, 3000)), "resident 0, resident 1, resident 2");
    CHECK_EQ(assigned(slots, {}, pool_of(8192, 3, 8192), pool_of(2999, 3, 2999)), "resident 0, resident 1, parked 2 pool 999");
}

TEST(in_a_pool_running_ones_go_first_and_then_what_was_used_last) {
    // one after the other: 2 and 4 run, then 3, 0 and 1 by the time of their last use; what is small fits after all
    CHECK_EQ(assigned({ idle(0, 300, 20), idle(1, 50, 10), running(2, 398, 1), idle(3, 200, 30), running(4, 198, 2) }, {},
                      pool_of(8192, 5, 8192), pool_of(1000, 5, 1000)),
            "parked 0 pool 200, resident 1, resident 2, resident 3, resident 4");
    CHECK_EQ(assigned({ running(0, 598, 1), running(1, 498, 2), idle(2, 400, 9) }, {}, pool_of(8192, 3, 8192), pool_of(1000, 3, 1000)),
            "parked 0 pool 500, resident 1, resident 2");
}

TEST(a_parked_state_comes_home_and_else_into_any_free_slot) {
    const auto big = window_of(4096, 4);
    const auto p   = [](int32_t id, int32_t id_home) { return from(id_home, 4096, idle(id, 10)); };

    CHECK_EQ(assigned({}, { p(7, 2) }, big, big), "7 placed 2");
    CHECK_EQ(assigned({ idle(2, 5) }, { p(7, 2) }, big, big), "resident 2, 7 placed 0");
    CHECK_EQ(assigned({ idle(0, 5) }, { p(7, 9) }, big, big), "resident 0, 7 placed 1");

    // nobody takes the home of one that can come home
    CHECK_EQ(assigned({ idle(3, 5) }, { p(7, 3), p(8, 0) }, big, big), "resident 3, 7 placed 1, 8 placed 0");
    CHECK_EQ(assigned({}, { p(7, 1), p(8, 1) }, big, window_of(4096, 2)), "7 placed 1, 8 placed 0");
}

TEST(running_ones_are_placed_before_idle_ones) {
    CHECK_EQ(assigned({}, { from(0, 4096, idle(5, 10)), from(0, 4096, running(6, 10)) }, window_of(4096, 1), window_of(4096, 1)),
            "5 parked n_seq 0, 6 placed 0");
    CHECK_EQ(assigned({}, { from(0, 4096, idle(5, 600)), from(1, 4096, running(6, 598)) }, window_of(4096, 1), pool_of(1000, 2, 1000)),
            "5 parked pool 400, 6 placed 1");
}

TEST(a_parked_state_waits_for_its_window) {
    const loads parked = { from(0, 8192, running(3, 4000)) };

    CHECK_EQ(assigned({}, parked, window_of(2048, 2), window_of(4001, 2)), "3 parked window 4001");
    CHECK_EQ(assigned({}, parked, window_of(2048, 2), window_of(4002, 2)), "3 placed 0");
}

TEST(a_window_as_large_as_the_one_it_had_takes_a_state_back) {
    for (const int64_t n_tokens : { 4094, 4095, 4096 }) {
        const loads parked = { from(1, 4096, running(3, n_tokens)) };

        CHECK_EQ(assigned({}, parked, window_of(2048, 2), window_of(4096, 2)), "3 placed 1");
        CHECK_EQ(assigned({}, parked, window_of(2048, 2), window_of(4095, 2)), "3 parked window 4095");
        CHECK_EQ(assigned({}, parked, window_of(2048, 2), pool_of(4096, 2, 4096)), "3 placed 1");
    }
}

TEST(a_parked_request_displaces_the_idle_state_used_longest_ago) {
    const loads parked = { from(9, 4096, running(5, 10)) };

    CHECK_EQ(assigned({ idle(0, 5, 30), idle(1, 5, 10), idle(2, 5, 20) }, parked, window_of(4096, 3), window_of(4096, 3)),
            "resident 0, parked 1 displaced 0, resident 2, 5 placed 1");
    CHECK_EQ(assigned({ running(0, 5, 1), running(1, 5, 1) }, parked, window_of(4096, 2), window_of(4096, 2)),
            "resident 0, resident 1, 5 parked n_seq 0");
}

TEST(an_idle_parked_state_displaces_nobody) {
    CHECK_EQ(assigned({ idle(0, 5) }, { from(0, 4096, idle(5, 10)) }, window_of(4096, 1), window_of(4096, 1)), "resident 0, 5 parked n_seq 0");
}

TEST(what_the_window_does_not_hold_displaces_nobody) {
    CHECK_EQ(assigned({ idle(0, 5) }, { from(0, 8192, running(5, 5000)) }, window_of(4096, 1), window_of(4096, 1)), "resident 0, 5 parked window 4096");
}

TEST(in_a_pool_only_one_that_makes_room_is_displaced) {
    const auto pool = pool_of(1000, 3, 1000);

    // the one that was used longest ago is too small
    CHECK_EQ(assigned({ idle(0, 200, 1), idle(1, 600, 2) }, { from(2, 1000, running(5, 598)) }, pool, pool),
            "resident 0, parked 1 displaced 0, 5 placed 1");
    CHECK_EQ(assigned({ idle(0, 500, 1), idle(1, 500, 2) }, { from(2, 1000, running(5, 598)) }, pool, pool),
            "resident 0, resident 1, 5 parked pool 0");
}

TEST(room_that_a_displacement_leaves_is_used) {
    const auto pool = pool_of(1000, 4, 1000);

    // by another request: nobody has to go for it
    CHECK_EQ(assigned({ idle(0, 700, 1), idle(1, 300, 2) }, { from(2, 1000, running(5, 398)), from(3, 1000, running(6, 298)) }, pool, pool),
            "parked 0 displaced 0, resident 1, 5 placed 0, 6 placed 3");
    // by one that was too long before
    CHECK_EQ(assigned({ idle(0, 600, 1), idle(1, 300, 2), running(2, 98) }, { from(3, 1000, running(5, 698)), from(3, 1000, running(6, 98)) }, pool, pool),
            "parked 0 displaced 0, parked 1 displaced 0, resident 2, 5 placed 1, 6 placed 0");
    // and by one in a slot that there were no cells for
    CHECK_EQ(assigned({ idle(0, 600, 2), idle(1, 500, 1), running(2, 98) }, { from(3, 1000, running(5, 398)) }, pool_of(8192, 4, 8192), pool),
            "parked 0 displaced 0, resident 1, resident 2, 5 placed 0");
}

//
// whatever the states and the geometries
//

struct generated {
    std::mt19937 random; // gives the same numbers everywhere, unlike the distributions

    server_geometry current;
    server_geometry next;

    loads slots;
    loads parked;

    int32_t n_parked_ever = 100;

    explicit generated(uint32_t seed) : random(seed) {
        current = geometry();
        next    = below(8) == 0 ? current : geometry();

        for (int32_t id = 0; id < current.n_seq; ++id) {
            slots.push_back(load(id, current.n_ctx_slot));
        }
        for (int64_t n = below(5); n > 0; --n) {
            const int64_t n_ctx_slot_home = 8 * (1 + below(8));
            const auto    held            = load(n_parked_ever++, n_ctx_slot_home);
            if (held.held()) {
                parked.push_back(from(below(7), n_ctx_slot_home, held));
            }
        }
    }

    int64_t below(int64_t n) { return random() % n; }

    server_geometry geometry() {
        const int64_t n_seq = 1 + below(6);
        const int64_t n_ctx = 8 * (1 + below(10));
        return below(2) ? pool_of(n_ctx, n_seq, std::min<int64_t>(n_ctx, 64)) : window_of(std::min<int64_t>(n_ctx, 64), n_seq);
    }

    server_state_load load(int32_t id, int64_t n_ctx_slot) {
        auto res = idle(id, below(3) ? below(n_ctx_slot + 1) : 0, below(4));
        if (below(2)) {
            const int64_t n_prompt = below(n_ctx_slot);
            res.running = true;
            res.n_need  = std::max(res.n_tokens, n_prompt) + 2 + below(3);
        }
        return res;
    }
};

static bool serves(const server_state_plan & state) {
    return state.fate == SERVER_STATE_FATE_RESIDENT || state.fate == SERVER_STATE_FATE_PLACED;
}

// the window that a state needs in `next`, where the one that it had is `n_ctx_slot`
static int64_t need_in(const server_geometry & next, const server_state_load & load, int64_t n_ctx_slot) {
    return next.n_ctx_slot < n_ctx_slot ? load.n_need : std::min(load.n_need, std::max(load.n_tokens, next.n_ctx_slot));
}

static void check_plan(const generated & g, const plans & states) {
    std::set<int32_t>          taken;
    std::map<int32_t, int64_t> needs, needs_parked; // by id

    int64_t n_cells = 0, n_cells_running = 0;
    for (const auto & state : states) {
        const auto & load = state.load;
        CHECK((state.was_parked ? needs_parked : needs).emplace(load.id, load.n_need).second);

        if (!serves(state)) {
            CHECK(state.fate == SERVER_STATE_FATE_PARKED && state.id_slot == -1 && state.reason != SERVER_PARK_REASON_NONE);
            CHECK(state.tokens_fit >= 0 && state.tokens_fit < std::max<int64_t>(1, load.n_need));
            CHECK(state.reason != SERVER_PARK_REASON_DISPLACED || (!state.was_parked && !load.running));
            continue;
        }
        CHECK(state.id_slot >= 0 && state.id_slot < g.next.n_seq && taken.insert(state.id_slot).second);
        CHECK((state.fate == SERVER_STATE_FATE_PLACED) == state.was_parked);
        CHECK(state.was_parked || state.id_slot == load.id);
        CHECK(state.reason == SERVER_PARK_REASON_NONE && state.tokens_fit == 0);
        CHECK(load.n_need <= g.next.n_ctx_slot);

        n_cells         += load.n_need;
        n_cells_running += load.running ? load.n_need : 0;
    }
    CHECK(!g.next.kv_unified || n_cells <= g.next.n_ctx);

    // every one that came in came out, with the need that it has there
    size_t n_held = 0;
    for (const auto * held : { &g.slots, &g.parked }) {
        for (const auto & load : *held) {
            if (load.held()) {
                const bool in_slot = held == &g.slots;
                CHECK_EQ((in_slot ? needs : needs_parked).at(load.id), need_in(g.next, load, in_slot ? g.current.n_ctx_slot : load.n_ctx_slot_home));
                n_held++;
            }
        }
    }
    CHECK_EQ(n_held, states.size());

    // nobody is left out for whom there is room, and no request because of a conversation that nobody is asking for
    const int64_t n_cells_left = (g.next.kv_unified ? g.next.n_ctx : INT64_MAX) - n_cells;
    for (const auto & state : states) {
        const bool has_slot = state.was_parked ? (int64_t) taken.size() < g.next.n_seq : state.load.id < g.next.n_seq && taken.count(state.load.id) == 0;
        if (serves(state) || state.reason == SERVER_PARK_REASON_WINDOW) {
            continue;
        }
        CHECK(!has_slot || state.reason == SERVER_PARK_REASON_DISPLACED || state.load.n_need > n_cells_left);

        if (state.load.running && !state.was_parked && has_slot) {
            CHECK(n_cells_running + state.load.n_need > g.next.n_ctx);
        }
        for (const auto & other : states) {
            const bool in_its_place = state.load.running && state.was_parked && serves(other) && !other.load.running;
            CHECK(!in_its_place || state.load.n_need > n_cells_left + other.load.n_need);
        }
    }
}

// all of them have a slot, a window and cells
static bool everything_fits(const generated & g) {
    int64_t n_cells = 0, n_states = 0;
    bool    res     = true;
    for (const auto * held : { &g.slots, &g.parked }) {
        for (const auto & load : *held) {
            const bool    in_slot = held == &g.slots;
            const int64_t n_need  = need_in(g.next, load, in_slot ? g.current.n_ctx_slot : load.n_ctx_slot_home);
            if (load.held()) {
                n_states++;
                n_cells += n_need;
                res = res && n_need <= g.next.n_ctx_slot && (!in_slot || load.id < g.next.n_seq);
            }
        }
    }
    return res && n_states <= g.next.n_seq && (!g.next.kv_unified || n_cells <= g.next.n_ctx);
}

// the states as they are after the change, for another one to the same geometry
static generated applied(const generated & g, const plans & states) {
    generated res = g;
    res.current = g.next;
    res.slots.clear();
    res.parked.clear();

    for (const auto & state : states) {
        if (serves(state)) {
            res.slots.push_back(state.load);
            res.slots.back().id = state.id_slot;
        } else if (state.was_parked) {
            res.parked.push_back(state.load);
        } else {
            res.parked.push_back(from(state.load.id, g.current.n_ctx_slot, state.load));
            res.parked.back().id = res.n_parked_ever++;
        }
    }
    std::sort(res.slots.begin(), res.slots.end(), [](const auto & a, const auto & b) { return a.id < b.id; });
    return res;
}

TEST(every_plan_keeps_every_state_and_every_bound) {
    int n_full = 0, n_displaced = 0, n_placed = 0;

    for (uint32_t seed = 0; seed < 30000; ++seed) {
        const generated g(seed);

        const auto states = server_state_assign(g.slots, g.parked, g.current, g.next);
        check_plan(g, states);

        const auto n_parked = std::count_if(states.begin(), states.end(), [](const auto & state) { return !serves(state); });
        if (everything_fits(g)) {
            CHECK_EQ(n_parked, 0);
            n_full++;
        }
        for (const auto & state : states) {
            n_displaced += state.reason == SERVER_PARK_REASON_DISPLACED;
            n_placed    += state.fate == SERVER_STATE_FATE_PLACED;
        }
    }

    // the cases are not all of one kind
    CHECK(n_full > 3000 && n_displaced > 1000 && n_placed > 10000);
}

TEST(the_outcome_assigned_again_changes_nothing) {
    for (uint32_t seed = 0; seed < 10000; ++seed) {
        generated g(seed);

        // a state that was in a slot cannot move to another one in one change: what was parked out of its slot may be placed by
        // the next change, and then displace another one; after a change that parked nobody it is at rest
        bool   at_rest  = false;
        size_t n_passes = 0;
        for (; !at_rest; ++n_passes) {
            const auto states = server_state_assign(g.slots, g.parked, g.current, g.next);
            check_plan(g, states);

            at_rest = true;
            for (const auto & state : states) {
                const bool is_out = !state.was_parked && !serves(state);
                CHECK(n_passes == 0 || !is_out || (state.reason == SERVER_PARK_REASON_DISPLACED && !state.load.running));
                at_rest = at_rest && !is_out;
            }
            CHECK(n_passes <= states.size());
            g = applied(g, states);
        }

        for (const auto & state : server_state_assign(g.slots, g.parked, g.current, g.next)) {
            CHECK_EQ(state.fate, state.was_parked ? SERVER_STATE_FATE_PARKED : SERVER_STATE_FATE_RESIDENT);
        }
    }
}
