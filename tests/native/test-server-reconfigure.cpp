// sources: server-reconfigure.cpp server-geometry.cpp server-state-plan.cpp

// The reconfigure logic: the order of its steps, its receipts, what it refuses with which numbers, and where the pause goes.

#include "fake-engine.h"

using steps = std::vector<std::string>;

static void check_refused(const server_reconfigure_result & res, server_reconfigure_reason reason, int status) {
    CHECK_EQ(server_reconfigure_outcome_name(res.outcome), std::string("refused"));
    CHECK_EQ(server_reconfigure_reason_name(res.reason), std::string(server_reconfigure_reason_name(reason)));
    CHECK_EQ(server_reconfigure_reason_status(res.reason), status);
    CHECK(!res.message.empty() && !res.stranded);
    CHECK_EQ(res.n_weight_loads, 1);
    CHECK_EQ(res.t_pause_us(), 0);
}

// refused before anything was built, and nothing was touched
static server_reconfigure_result refused_at_once(
        fake_engine & engine, const server_geometry_request & request, server_reconfigure_reason reason, int status) {
    const auto before = engine.told();
    const auto res    = reconfigure(engine, request);
    check_refused(res, reason, status);
    CHECK(engine.calls.empty());
    CHECK_EQ(engine.told(), before);
    CHECK(res.geometry == engine.served && res.previous == engine.served);
    engine.check_at_rest();
    return res;
}

// refused when the contexts were built: `meanwhile` happened to the slots
static server_reconfigure_result refused_when_built(
        fake_engine & engine, const server_geometry_request & request, server_reconfigure_reason reason, int status,
        const std::function<void()> & meanwhile = [] {}) {
    std::string before;
    const auto  res = reconfigure(engine, request, [&] { meanwhile(); before = engine.told(); });
    check_refused(res, reason, status);
    CHECK(engine.calls.size() <= 1);
    CHECK_EQ(engine.told(), before);
    CHECK(res.geometry == engine.served);
    return res;
}

static int32_t park(fake_engine & engine, int32_t id_home, int64_t n_tokens, bool running) {
    server_state_load load;
    load.id              = engine.n_parked_ever++;
    load.n_tokens        = n_tokens;
    load.n_need          = n_tokens + (running ? 2 : 0);
    load.n_bytes         = n_tokens * CELL_BYTES;
    load.running         = running;
    load.id_home         = id_home;
    load.n_ctx_slot_home = 8192;
    engine.parked_held.push_back({ load, std::to_string(n_tokens) + " tokens that were parked" });
    return load.id;
}

TEST(every_reason_and_outcome_has_a_name_and_a_status) {
    std::string names;
    for (int i = 0; i <= SERVER_RECONFIGURE_REASON_ROPE_SCALING_CHANGE + 1; ++i) {
        names += server_reconfigure_reason_name((server_reconfigure_reason) i);
        names += " " + std::to_string(server_reconfigure_reason_status((server_reconfigure_reason) i)) + ", ";
    }
    CHECK_EQ(names, "none 409, invalid_geometry 400, cache_type_change 409, fan_out_in_progress 409, reconfigure_in_progress 409, "
                    "page_out_failed 500, context_build_failed 503, insufficient_memory 409, media_held 409, rope_scaling_change 409, unknown 409, ");

    names = "";
    for (int i = 0; i <= SERVER_RECONFIGURE_OUTCOME_REFUSED + 1; ++i) {
        names += std::string(server_reconfigure_outcome_name((server_reconfigure_outcome) i)) + " ";
    }
    CHECK_EQ(names, "applied unchanged planned refused unknown ");
}

//
// applied
//

TEST(grow_carries_every_state) {
    fake_engine engine(16384, 2);
    engine.hold(0, 5053);
    engine.hold(1, 17, true);

    const auto contents = engine.contents();
    const auto res      = reconfigure(engine, ask(131072, 4));

    CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK(engine.contents() == contents);
    CHECK_EQ(res.previous.n_ctx, 16384);
    CHECK_EQ(res.geometry.n_ctx, 131072);
    CHECK_EQ(res.geometry.n_ctx_slot, 8192);
    CHECK(res.geometry == engine.served);
    CHECK(res.beside);
    CHECK_EQ(res.n_tokens_held, 5070);
    CHECK_EQ(res.n_bytes_held, 507000);
    CHECK_EQ(res.bytes_needed.at("CPU"), 13107200);
    CHECK_EQ(res.states.size(), 2u);
    CHECK_EQ(res.n_weight_loads, 1);
    CHECK((engine.calls == steps{ "build 1", "sync 1", "move 1", "move 2", "attach 1" }));
}

TEST(empty_slots_are_not_carried) {
    fake_engine engine(16384, 2);
    engine.hold(1, 0, true); // a request that has not begun is

    const auto res = reconfigure(engine, ask(32768, 4));
    CHECK_EQ(res.states.size(), 1u);
    CHECK_EQ(res.n_bytes_held, 0);
    CHECK((engine.calls == steps{ "build 1", "sync 1", "move 1", "attach 1" }));
}

TEST(a_shrink_parks_and_a_grow_places) {
    fake_engine engine(32768, 4);
    engine.hold(0, 100);
    engine.hold(2, 6000, true);
    engine.hold(3, 200, true);

    const auto contents = engine.contents();

    auto res = reconfigure(engine, ask(8192, 2));
    CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(res.n_tokens_held, 6300);
    CHECK_EQ(res.n_bytes_held, 630000);
    CHECK_EQ(engine.parked_held.size(), 2u);
    CHECK((engine.calls == steps{ "build 1", "sync 1", "move 1", "capture 1", "capture 2", "attach 1" }));

    engine.calls.clear();
    res = reconfigure(engine, ask(8192, 3)); // the second is placed, not in its home; the first waits for its window
    CHECK_EQ(res.n_tokens_held, 300);
    CHECK_EQ(res.n_bytes_held, 30000);
    CHECK_EQ(res.states.size(), 3u);
    CHECK_EQ(engine.slots_held[1].load.n_tokens, 200);
    CHECK_EQ(engine.parked_held.size(), 1u);
    CHECK((engine.calls == steps{ "build 2", "sync 2", "move 2", "place 1", "attach 2" }));

    res = reconfigure(engine, ask(32768, 4));
    CHECK_EQ(engine.slots_held[2].load.n_tokens, 6000);
    CHECK(engine.parked_held.empty());
    CHECK(engine.contents() == contents);
}

TEST(a_parked_state_that_cannot_be_placed_stays_parked) {
    for (const bool no_memory_beside : { false, true }) {
        fake_engine engine(16384, 2);
        engine.hold(0, 100);
        park(engine, 1, 50, true);
        park(engine, 2, 60, true);
        engine.no_memory_beside = no_memory_beside;
        engine.fault            = [](const std::string & call, size_t) { return call == "place 1"; };

        const auto contents = engine.contents();
        const auto res      = reconfigure(engine, ask(65536, 4));

        CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK_EQ(res.beside, !no_memory_beside);
        CHECK(engine.contents() == contents);
        CHECK_EQ(engine.parked_held.size(), 1u);
        CHECK_EQ(res.states[1].fate, SERVER_STATE_FATE_PARKED);
        CHECK_EQ(res.states[1].id_slot, -1);
        CHECK_EQ(res.states[2].fate, SERVER_STATE_FATE_PLACED);
        CHECK_EQ(res.n_tokens_held, 160);
        CHECK_EQ(res.n_bytes_held, 16000);
    }
}

TEST(what_serves_already_is_unchanged_and_not_touched) {
    fake_engine engine(10752, 3);
    engine.hold(0, 5);
    park(engine, 0, 50, true); // it had its chance

    for (const auto & request : { ask(10752, 3), ask(10000, 3), ask({}), ask({}, 3), ask({}, {}, false), ask_type("f16") }) {
        const auto res = reconfigure(engine, request);
        CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_UNCHANGED);
        CHECK_EQ(res.geometry.n_ctx, 10752);
        CHECK(res.previous == res.geometry);
        CHECK_EQ(res.n_weight_loads, 1);
    }
    CHECK(engine.calls.empty());
}

//
// dry run
//

TEST(a_dry_run_tells_and_touches_nothing) {
    for (const int64_t memory_total : { (int64_t) 0, (int64_t) 1638400 + 500000 }) {
        fake_engine engine(16384, 2);
        engine.hold(0, 700);
        engine.hold(1, 3000, true);
        park(engine, 0, 50, true);
        park(engine, 0, 5000, true);
        engine.memory_total = memory_total > 0 ? memory_total + 505000 : 0;

        const auto before  = engine.told();
        auto       request = ask(4096, 1);
        request.dry_run = true;
        const auto res = reconfigure(engine, request);

        CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_PLANNED);
        CHECK_EQ(res.beside, memory_total == 0);
        CHECK_EQ(res.geometry.n_ctx, 4096);
        CHECK_EQ(res.bytes_needed.at("CPU"), 409600);
        CHECK_EQ(res.states.size(), 4u);
        CHECK_EQ(res.n_tokens_held, 3750); // the one that stays parked is not counted
        CHECK_EQ(res.n_bytes_held, 375000);
        CHECK_EQ(res.t_pause_us(), 0);
        CHECK_EQ(engine.told(), before);
        CHECK((engine.calls == steps{ "build 1" }));
    }
}

//
// refused
//

TEST(a_value_out_of_range_is_refused_with_its_bounds) {
    fake_engine engine(16384, 2);
    engine.hold(0, 5);

    CHECK_EQ(refused_at_once(engine, ask(-1), SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY, 400).details.at("n_ctx"), -1);
    CHECK_EQ(refused_at_once(engine, ask({}, 2049), SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY, 400).details.at("n_seq_max"), 256);
    refused_at_once(engine, ask_type("f17", true), SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY, 400);
}

TEST(media_and_fan_out_are_refused_by_slot_before_the_build_and_after_it) {
    const std::pair<bool server_state_load::*, server_reconfigure_reason> cases[] = {
        { &server_state_load::has_media,        SERVER_RECONFIGURE_REASON_MEDIA_HELD },
        { &server_state_load::waits_for_parent, SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS },
    };
    for (const auto & [flag, reason] : cases) {
        fake_engine engine(16384, 2);
        engine.hold(0, 5);
        engine.hold(1, 6, true);

        auto & slot = engine.slots_held[1].load;
        CHECK_EQ(refused_when_built(engine, ask(32768), reason, 409, [&, flag = flag] { slot.*flag = true; }).details.at("slot"), 1);

        engine.calls.clear();
        CHECK_EQ(refused_at_once(engine, ask(32768), reason, 409).details.at("slot"), 1);
    }
}

TEST(the_bookkeeping_of_cells_is_checked_before_the_build) {
    fake_engine engine(16384, 2);
    engine.hold(0, 5);
    engine.lim.cell_bytes = 64;
    engine.memory_total   = 1638400 + 131072 * 64 - 1;

    const auto res = refused_at_once(engine, ask(131072), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);
    CHECK_EQ(res.details.at("bytes_needed"), 131072 * 64);
    CHECK_EQ(res.details.at("bytes_available"), 131072 * 64 - 1);

    engine.memory_total++;
    CHECK_EQ(refused_when_built(engine, ask(131072), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409).details.at("bytes_needed"), 13107200);
}

TEST(what_cannot_fit_at_all_is_refused_before_the_build_and_says_both_numbers) {
    fake_engine engine(16384, 2);
    engine.hold(0, 5);
    engine.lim.cell_bytes_least = CELL_BYTES;
    engine.memory_total         = 13107200 - 1; // the serving contexts would be let go

    const auto res = refused_at_once(engine, ask(131072), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);
    CHECK_EQ(res.details.at("bytes_needed"), 13107200);
    CHECK(res.message.find("(12 MiB needed, 10 MiB available)") != std::string::npos);

    engine.memory_total++;
    CHECK_EQ(reconfigure(engine, ask(131072)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
}

TEST(choices_that_wait_for_their_slots_are_not_shrunk_away) {
    fake_engine engine(16384, 4);
    engine.lim.n_seq_waiting = 3;

    const auto res = refused_at_once(engine, ask(16384, 2), SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS, 409);
    CHECK_EQ(res.details.at("n_seq_needed"), 3);
    CHECK_EQ(reconfigure(engine, ask(16384, 3)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);

    engine.lim.n_seq_waiting = 5; // it cannot begin here either
    CHECK_EQ(reconfigure(engine, ask(16384, 2)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
}

TEST(a_change_that_would_park_past_the_ceiling_of_pages_is_refused) {
    fake_engine engine(16384, 2);
    engine.hold(1, 500);
    engine.lim.page_bytes_left = 50000 - 1;

    const auto res = refused_when_built(engine, ask(16384, 1), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);
    CHECK_EQ(res.details.at("bytes_needed"), 50000);
    CHECK_EQ(res.details.at("bytes_available"), 50000 - 1);

    engine.lim.page_bytes_left++;
    CHECK_EQ(reconfigure(engine, ask(16384, 1)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
}

TEST(contexts_that_fit_neither_beside_nor_instead_are_refused_with_both_numbers) {
    for (const bool no_memory_beside : { false, true }) {
        fake_engine engine(16384, 2);
        engine.hold(1, 500);
        engine.no_memory_beside = no_memory_beside;
        engine.memory_total     = 2560000 + 50000 - 1; // 25,600 cells and the state that would be parked

        const auto res = refused_when_built(engine, ask(25600, 1), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);
        CHECK_EQ(res.details.at("bytes_needed"), 2610000);
        CHECK_EQ(res.details.at("bytes_available"), 2610000 - 1 - 1638400);

        engine.memory_total++;
        CHECK_EQ(reconfigure(engine, ask(25600, 1)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK(!engine.live->cells.count(1) && engine.parked_held.size() == 1);
    }
}

TEST(states_without_memory_to_capture_them_keep_their_contexts) {
    fake_engine engine(16384, 2);
    engine.hold(0, 3000);
    engine.hold(1, 2000);
    engine.memory_total = 1638400 + 499999;

    const auto res = refused_when_built(engine, ask(12288, 2), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);
    CHECK_EQ(res.details.at("bytes_needed"), 1228800);
    CHECK_EQ(res.details.at("bytes_available"), 499999);

    engine.memory_total++;
    CHECK_EQ(reconfigure(engine, ask(12288, 2)).beside, false);
}

TEST(a_state_that_is_copied_is_there_twice_for_a_moment) {
    fake_engine engine(8192, 1);
    engine.hold(0, 4000);
    park(engine, 0, 6000, false);
    engine.memory_total = 819200 + 600000 + 580800 - 1;

    const auto before = engine.told();
    const auto res    = reconfigure(engine, ask(12288, 2));
    check_refused(res, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);
    CHECK_EQ(res.details.at("bytes_needed"), 1000000); // 1,228,800 in the end, of which 400,000 were captured
    CHECK_EQ(res.details.at("bytes_available"), 999999);
    CHECK_EQ(engine.told(), before);

    engine.memory_total++;
    CHECK_EQ(reconfigure(engine, ask(12288, 2)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(engine.contents().size(), 2u);
    CHECK(engine.parked_held.empty());
}

TEST(cells_that_are_shared_are_not_let_go) {
    fake_engine engine(4096, 3, true);
    engine.hold(0, 2000);
    engine.hold(1, 2000);
    engine.hold(2, 97); // with a prefix in common
    engine.no_memory_beside = true;

    refused_when_built(engine, ask(8192), SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY, 409);

    engine.hold(2, 96);
    CHECK_EQ(reconfigure(engine, ask(8192)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
}

TEST(a_build_that_failed_for_another_reason_lets_nothing_go) {
    fake_engine engine(16384, 2);
    engine.hold(0, 3000);
    engine.fault = [](const std::string & call, size_t) { return call == "build 1"; };

    const auto res = refused_when_built(engine, ask(32768), SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED, 503);
    CHECK(res.message.find("the old ones are serving: injected") != std::string::npos);
}

//
// by force
//

TEST(a_kv_type_change_is_a_cold_start) {
    fake_engine engine(16384, 2);
    refused_at_once(engine, ask_type("q8_0"), SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE, 409);

    engine.hold(0, 3000);
    engine.hold(1, 10, true);
    engine.slots_held[1].load.has_media = true; // that can be dropped
    park(engine, 1, 50, true);
    refused_at_once(engine, ask_type("q8_0"), SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE, 409);

    for (const bool no_memory_beside : { false, true }) {
        auto copy = engine;
        copy.no_memory_beside = no_memory_beside;

        const auto res = reconfigure(copy, ask_type("q8_0", true));
        CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK_EQ(copy.served.cache_type_k, "q8_0");
        CHECK(copy.contents().empty());
        CHECK_EQ(res.states.size(), 3u);
        for (const auto & state : res.states) {
            CHECK_EQ(state.fate, SERVER_STATE_FATE_DROPPED);
        }
        CHECK_EQ(res.states[2].was_parked, true);
        CHECK_EQ(res.n_tokens_held, 0);
        CHECK_EQ(res.n_bytes_held, 0);
    }

    // force alone drops nothing
    auto request = ask(32768);
    request.force = true;
    engine.slots_held[1].load.has_media = false;
    CHECK_EQ(reconfigure(engine, request).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(engine.contents().size(), 3u);
}

TEST(other_rope_factors_are_refused_where_something_is_held) {
    const std::function<void(fake_engine &)> cases[] = {
        [](fake_engine & engine) { engine.hold(0, 5); },
        [](fake_engine & engine) { engine.hold(1, 0, true); },
        [](fake_engine & engine) { park(engine, 0, 5, false); },
        [](fake_engine & engine) { engine.lim.n_states_cached = 1; },
    };
    for (const auto & hold : cases) {
        fake_engine engine(16384, 4);
        engine.lim.n_ctx_rope = 4096;

        // to the switch is not across it; with nothing held there is nothing to be wrong
        CHECK_EQ(reconfigure(engine, ask(8192, 2)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK_EQ(reconfigure(engine, ask(8704, 2)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK_EQ(reconfigure(engine, ask(8192, 2)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);

        // also by the time that the contexts are built
        engine.calls.clear();
        refused_when_built(engine, ask(8704), SERVER_RECONFIGURE_REASON_ROPE_SCALING_CHANGE, 409, [&] { hold(engine); });

        engine.calls.clear();
        const auto res = refused_at_once(engine, ask(8704), SERVER_RECONFIGURE_REASON_ROPE_SCALING_CHANGE, 409);
        CHECK_EQ(res.details.at("n_ctx_seq"), 4352);
        CHECK_EQ(res.details.at("n_ctx_seq_switch"), 4096);

        auto request = ask(8704);
        request.force = true;
        CHECK_EQ(reconfigure(engine, request).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK(engine.contents().empty());
    }

    // what came while the contexts were built is dropped as well
    fake_engine engine(16384, 4);
    engine.lim.n_ctx_rope = 4096;
    auto request = ask(65536);
    request.force = true;
    CHECK_EQ(reconfigure(engine, request, [&] { engine.hold(0, 5); }).states.at(0).fate, SERVER_STATE_FATE_DROPPED);
    CHECK(engine.contents().empty());
}

//
// the pause
//

TEST(the_phases_add_up_to_the_pause) {
    for (const bool no_memory_beside : { false, true }) {
        fake_engine engine(32768, 4);
        engine.hold(0, 100);
        engine.hold(1, 200);
        engine.hold(2, 300);
        park(engine, 1, 50, true);
        engine.no_memory_beside = no_memory_beside;

        // slot 1 makes room for the parked one, slot 2 is gone
        engine.hold(0, 100, true);
        auto request = ask(16384, 2);
        request.t_us = engine.now - 7;

        int64_t    t_safe_point_us = 0;
        const auto res = reconfigure(engine, request, [&] { engine.now += 11; t_safe_point_us = engine.now; });

        CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK_EQ(res.beside, !no_memory_beside);
        CHECK_EQ(res.t_wait_us, 7 + 11);
        CHECK_EQ(res.t_build_us, T_BUILD_US);

        CHECK_EQ(res.t_sync_us, T_SYNC_US);
        CHECK_EQ(res.t_page_out_us, 3 * T_OUT_US); // all of them are captured, or one is moved and two are captured
        CHECK_EQ(res.t_release_us, no_memory_beside ? T_RELEASE_US : 0);
        CHECK_EQ(res.t_rebuild_us, no_memory_beside ? T_BUILD_US : 0);
        CHECK_EQ(res.t_page_in_us, 2 * T_IN_US);
        CHECK_EQ(res.t_attach_us, T_ATTACH_US);
        CHECK_EQ(res.t_swap_us, T_COMMIT_US);
        CHECK_EQ(res.t_pause_us(), engine.now - t_safe_point_us);
    }
}
