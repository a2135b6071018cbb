// sources: server-reconfigure.cpp server-geometry.cpp server-state-plan.cpp

// A change with a fault at every call it makes: the old geometry with every state, or the new one with every state, or
// nothing serves and every state is parked. And the next change works.

#include "fake-engine.h"

#include <set>

using fault_set = std::set<size_t>;

struct path {
    const char * name;

    int64_t memory_total;
    bool    no_memory_beside;
    bool    force_type; // a change that drops what is held
};

// the numbers of scene(): 1,638,400 bytes serve, 650,000 of them are held, 470,000 are parked; the new contexts and what is
// parked beside them take 1,041,200, or 691,200 where all is dropped
static constexpr int64_t MEMORY_TOTAL = 1638400 + 470000 + 660000;

static const path PATHS[] = {
    { "beside",                             0,            false, false },
    { "beside, forced",                     0,            false, true  },
    { "released by the numbers",            MEMORY_TOTAL, false, false },
    { "released by the numbers, forced",    MEMORY_TOTAL, false, true  },
    { "released by a failed build",         0,            true,  false },
    { "released by a failed build, forced", 0,            true,  true  },
};

// four states in slots and two parked ones, of which one can be placed
static fake_engine scene(const path & p) {
    fake_engine res(16384, 4);
    res.hold(0, 1000);
    res.hold(1, 2000, true);
    res.hold(2, 3000, true);
    res.hold(3, 500);

    for (const int64_t n_tokens : { 700, 4000 }) {
        server_state_load load;
        load.id              = res.n_parked_ever++;
        load.n_tokens        = n_tokens;
        load.n_need          = n_tokens + 2;
        load.n_bytes         = n_tokens * CELL_BYTES;
        load.running         = true;
        load.id_home         = 5;
        load.n_ctx_slot_home = 8192;
        res.parked_held.push_back({ load, std::to_string(n_tokens) + " tokens that were parked" });
    }

    res.memory_total     = p.memory_total;
    res.no_memory_beside = p.no_memory_beside;
    return res;
}

// three slots of 2304: 0 and 1 stay, 2 is too long, 3 is gone, the first parked one is placed
static server_geometry_request smaller(const path & p) {
    auto res = ask(6912, 3);
    if (p.force_type) {
        res.cache_type_k = "q8_0";
        res.force        = true;
    }
    return res;
}

static void check_placed(const fake_engine & engine, const server_reconfigure_result & res) {
    CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK(engine.live && engine.served == res.geometry);
    CHECK_EQ(engine.served.n_ctx, 6912);

    int n_slots = 0, n_parked = 0;
    for (const auto & state : res.states) {
        n_slots  += state.id_slot >= 0;
        n_parked += state.fate == SERVER_STATE_FATE_PARKED;
    }
    CHECK_EQ(n_slots,  std::count_if(engine.slots_held.begin(), engine.slots_held.end(), [](const auto & slot) { return slot.load.held(); }));
    CHECK_EQ((size_t) n_parked, engine.parked_held.size());
}

// one change with the faults given, and the next one without them; returns the verbs that failed
static std::vector<std::string> run_with(const path & p, const fault_set & faults, bool all_after = false) {
    auto engine = scene(p);
    engine.fault = [&](const std::string &, size_t n) { return faults.count(n) > 0 || (all_after && n >= *faults.begin()); };

    const auto contents = engine.contents();
    const auto before   = engine.told();
    const auto old      = engine.served;

    const auto res    = reconfigure(engine, smaller(p));
    const auto failed = engine.failed;

    // a parked state that cannot be placed stays parked, and nothing else
    const bool placing_alone = std::all_of(failed.begin(), failed.end(), [](const auto & call) { return call.find("place") == 0; });

    if (res.outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED) {
        check_placed(engine, res);
        CHECK(p.force_type ? engine.contents().empty() : engine.contents() == contents);

        CHECK(placing_alone);
        CHECK_EQ(engine.parked_held.size(), p.force_type ? 0u : 3u + failed.size());
        return failed;
    }

    CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_REFUSED);
    CHECK(res.geometry == old && engine.served == old);
    CHECK(engine.contents() == contents);
    CHECK(!placing_alone && (failed.front() == "sync 1" || res.message.find("injected") != std::string::npos));

    if (res.stranded) {
        CHECK(!engine.live && engine.slots_held.empty());
        CHECK_EQ(engine.parked_held.size(), contents.size());
        CHECK_EQ(res.reason, SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED);
        CHECK_EQ(res.states.size(), contents.size());
        for (const auto & state : res.states) {
            CHECK(state.fate == SERVER_STATE_FATE_PARKED && state.id_slot == -1);
            CHECK(state.was_parked || (state.reason == SERVER_PARK_REASON_NO_CONTEXT && state.tokens_fit == 0));
        }
        CHECK(failed.size() >= 2); // one fault has a way back
    } else {
        CHECK_EQ(engine.told(), before);
    }

    engine.fault            = [](const std::string &, size_t) { return false; };
    engine.no_memory_beside = false;

    const auto again = reconfigure(engine, smaller(p));
    check_placed(engine, again);
    CHECK(p.force_type ? engine.contents().empty() : engine.contents() == contents);
    return failed;
}

static void check_failed(const std::set<std::string> & failed, const std::vector<std::string> & expected) {
    for (const auto & call : expected) {
        if (failed.count(call) == 0) {
            std::cerr << "no fault at " << call << "\n";
        }
        CHECK(failed.count(call) == 1);
    }
}

TEST(a_fault_at_any_call_loses_nothing) {
    for (const auto & p : PATHS) {
        std::cerr << "  " << p.name << "\n";

        std::set<std::string> failed;
        for (size_t n = 1;; ++n) {
            const auto calls = run_with(p, { n });
            if (calls.empty()) {
                break;
            }
            failed.insert(calls.begin(), calls.end());
        }

        if (p.memory_total == 0 && !p.no_memory_beside) {
            check_failed(failed, { "build 1", "sync 1", "attach 1" });
            if (!p.force_type) {
                check_failed(failed, { "move 1", "move 2", "capture 1", "capture 2", "place 1" });
            }
            continue;
        }
        check_failed(failed, { "sync 1", "capture 1", "capture 2", "capture 3", "capture 4", "build 2", "attach 1" });
        if (!p.force_type) {
            check_failed(failed, { "restore 1", "restore 2", "place 1" });
        }
    }
}

TEST(a_second_fault_on_the_way_back_loses_nothing) {
    for (const auto & p : PATHS) {
        std::cerr << "  " << p.name << "\n";

        std::set<std::string> second;
        for (size_t n = 1, n_failed = 1; n_failed > 0; ++n) {
            n_failed = run_with(p, { n }).size();
            for (size_t m = n + 1; n_failed > 0; ++m) {
                const auto calls = run_with(p, { n, m });
                if (calls.size() < 2) {
                    break;
                }
                second.insert(calls.back());
            }
        }
        if (p.memory_total > 0 || p.no_memory_beside) {
            check_failed(second, { "build 3", "attach 2", "restore 3", "restore 4" });
            check_failed(second, { p.force_type ? "restore 1" : "restore 6" });
        }
    }
}

TEST(when_nothing_works_from_a_call_on_nothing_is_lost) {
    for (const auto & p : PATHS) {
        for (size_t n = 1; !run_with(p, { n }, true).empty(); ++n) {
        }
    }
}

//
// no geometry serves
//

static fake_engine stranded() {
    const path p = PATHS[4];

    auto engine = scene(p);
    engine.fault = [](const std::string & call, size_t) { return call == "build 2" || call == "build 3"; };

    const auto contents = engine.contents();
    const auto res      = reconfigure(engine, smaller(p));

    CHECK(res.stranded && !engine.serving());
    CHECK(res.message.find("New: injected. Old: injected") != std::string::npos);
    CHECK_EQ(server_reconfigure_reason_status(res.reason), 503);
    CHECK(engine.contents() == contents);

    engine.fault = [](const std::string &, size_t) { return false; };
    return engine;
}

TEST(the_geometry_that_served_last_is_no_unchanged_one_when_nothing_serves) {
    auto engine = stranded();

    const auto contents = engine.contents();

    CHECK_EQ(reconfigure(engine, {}).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(engine.served.n_ctx, 16384);
    CHECK(engine.contents() == contents);
    CHECK_EQ(engine.parked_held.size(), 2u); // two more than there are slots

    CHECK_EQ(reconfigure(engine, {}).outcome, SERVER_RECONFIGURE_OUTCOME_UNCHANGED);
}

TEST(a_refusal_when_nothing_serves_does_not_say_that_something_does) {
    for (const bool no_memory : { false, true }) {
        auto engine = stranded();

        const auto before = engine.told();

        server_reconfigure_plan   plan;
        server_reconfigure_result res;
        CHECK(server_reconfigure_begin(engine, ask(6912, 3), plan, res));

        server_reconfigure_build made;
        made.no_memory = no_memory;
        made.error     = "injected";
        res = server_reconfigure_finish(engine, plan, made);

        CHECK_EQ(res.reason, no_memory ? SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY : SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED);
        CHECK(res.message.find("old ones") == std::string::npos);
        CHECK(res.message.find("nothing serves") != std::string::npos);
        CHECK_EQ(engine.told(), before);
        engine.check_at_rest();
    }
}

TEST(running_states_are_placed_first_when_something_serves_again) {
    auto engine = stranded();

    const auto contents = engine.contents();

    // two slots, for two that are running and fit; then one for everyone
    CHECK_EQ(reconfigure(engine, ask(4608, 2)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(engine.parked_held.size(), 4u);
    for (const auto & slot : engine.slots_held) {
        CHECK(slot.load.running);
    }
    CHECK(engine.contents() == contents);

    CHECK_EQ(reconfigure(engine, ask(49152, 6)).outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK(engine.parked_held.empty());
    CHECK(engine.contents() == contents);
}

TEST(what_the_numbers_refuse_after_the_release_goes_back) {
    // they are worse by then than they were before: another process took the memory
    auto engine = scene(PATHS[2]);

    const auto before = engine.told();

    engine.fault = [&](const std::string & call, size_t) {
        engine.memory_total -= call == "capture 4" ? 900000 : 0;
        return false;
    };
    const auto res = reconfigure(engine, ask(12288, 2));

    CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_REFUSED);
    CHECK_EQ(res.reason, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY);
    CHECK(res.details.at("bytes_needed") > res.details.at("bytes_available"));
    CHECK_EQ(engine.n_calls["build"], 2); // beside, and the old ones again
    CHECK_EQ(engine.told(), before);
}

TEST(what_was_captured_is_not_counted_twice) {
    // 1,433,600 for the contexts and what is parked beside them: more than is free after the release, not more than will be
    auto engine = scene(PATHS[2]);

    const auto contents = engine.contents();
    const auto res      = reconfigure(engine, ask(14336, 2));

    CHECK_EQ(res.outcome, SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK(!res.beside);
    CHECK(engine.contents() == contents);
    CHECK(engine.limits().memory_bytes > 1);
}
