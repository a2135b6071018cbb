// sources: server-reconfigure.cpp

// The reconfigure logic against a fake engine: what it refuses, what it carries over, and that a failure at any step leaves
// the old geometry with every state.

#include "server-reconfigure.h"
#include "testing.h"

#include <map>
#include <string>

using geometry_request = server_geometry_request;

// what a slot of the fake holds is its number of tokens, in the contexts that serve and in those that were built
struct fake_engine : server_reconfigure_engine {
    server_geometry        serving;
    server_geometry_limits lim;

    std::vector<server_slot_load> loads;

    std::map<int32_t, int64_t> held;       // slot -> tokens, in the serving contexts
    std::map<int32_t, int64_t> held_built; // in the built ones

    bool has_build  = false;
    int  n_commits  = 0;
    int  n_discards = 0;

    std::string fail_at; // the step that fails: build sync move attach
    int32_t     fail_slot = -1;

    std::vector<std::string> steps;

    mutable int64_t now = 1000;

    fake_engine(int64_t n_ctx, int64_t n_seq, bool kv_unified = false) {
        serving.n_ctx        = n_ctx;
        serving.n_seq        = n_seq;
        serving.n_ctx_seq    = kv_unified ? n_ctx : n_ctx / n_seq;
        serving.n_ctx_slot   = std::min<int64_t>(serving.n_ctx_seq, 8192);
        serving.kv_unified   = kv_unified;
        serving.cache_type_k = "f16";
        serving.cache_type_v = "f16";

        lim.n_batch     = 2048;
        lim.n_seq_max   = 256;
        lim.n_ctx_train = 8192;
        lim.cell_bytes  = 64;

        for (int32_t id = 0; id < n_seq; id++) {
            loads.push_back({});
            loads.back().id = id;
        }
    }

    void hold(int32_t id, int64_t n_tokens) {
        held[id]           = n_tokens;
        loads[id].n_tokens = n_tokens;
        loads[id].n_need   = n_tokens;
    }

    server_geometry               geometry() const override { return serving; }
    server_geometry_limits        limits()   const override { return lim; }
    std::vector<server_slot_load> slots()    const override { return loads; }
    int64_t                       time_us()  const override { return now += 10; }
    int64_t                       n_weight_loads() const override { return 1; }

    server_reconfigure_build build(const server_geometry & /*next*/) override {
        steps.push_back("build");
        server_reconfigure_build res;
        res.ok    = fail_at != "build";
        res.error = res.ok ? "" : "injected";
        res.bytes_needed["CPU"] = 1000;
        res.host_bytes_needed   = 1000;
        has_build = res.ok;
        return res;
    }

    bool sync() override {
        steps.push_back("sync");
        return fail_at != "sync";
    }

    server_reconfigure_move move(int32_t id_slot) override {
        steps.push_back("move " + std::to_string(id_slot));
        server_reconfigure_move res;
        if (fail_at == "move" && id_slot == fail_slot) {
            res.error = "injected";
            return res;
        }
        res.ok       = true;
        res.n_bytes  = held.at(id_slot) * 100;
        res.t_out_us = 3;
        res.t_in_us  = 4;
        held_built[id_slot] = held.at(id_slot);
        return res;
    }

    bool attach(std::string & error) override {
        steps.push_back("attach");
        error = "injected";
        return fail_at != "attach";
    }

    void commit(const server_geometry & next) noexcept override {
        steps.push_back("commit");
        serving = next;
        held    = held_built;
        held_built.clear();
        has_build = false;
        n_commits++;
    }

    void discard() noexcept override {
        held_built.clear();
        has_build = false;
        n_discards++;
    }
};

// begin, build, finish, as the server does it
static server_reconfigure_result reconfigure(fake_engine & engine, const geometry_request & request) {
    server_reconfigure_plan   plan;
    server_reconfigure_result res;
    if (!server_reconfigure_begin(engine, request, plan, res)) {
        return res;
    }
    return server_reconfigure_finish(engine, plan, engine.build(plan.next));
}

static geometry_request ask(std::optional<int64_t> n_ctx, std::optional<int64_t> n_seq = std::nullopt) {
    geometry_request res;
    res.n_ctx = n_ctx;
    res.n_seq = n_seq;
    return res;
}

static void check_refused(const server_reconfigure_result & res, server_reconfigure_reason reason) {
    CHECK_EQ(server_reconfigure_outcome_name(res.outcome), std::string("refused"));
    CHECK_EQ(server_reconfigure_reason_name(res.reason), std::string(server_reconfigure_reason_name(reason)));
    CHECK(!res.message.empty());
}

TEST(grow_carries_every_state) {
    fake_engine engine(16384, 2);
    engine.hold(0, 5053);
    engine.hold(1, 17);

    const auto res = reconfigure(engine, ask(131072, 4));

    CHECK(res.outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(res.previous.n_ctx, 16384);
    CHECK_EQ(res.geometry.n_ctx, 131072);
    CHECK_EQ(res.geometry.n_seq, 4);
    CHECK_EQ(res.geometry.n_ctx_seq, 32768);
    CHECK_EQ(res.geometry.n_ctx_slot, 8192); // the training context
    CHECK(res.geometry == engine.serving);
    CHECK_EQ(res.n_tokens_held, 5070);
    CHECK_EQ(res.n_bytes_held, 507000);
    CHECK_EQ(res.slots.size(), 2u);
    CHECK_EQ(res.n_weight_loads, 1);
    CHECK_EQ(engine.held[0], 5053);
    CHECK_EQ(engine.held[1], 17);
    CHECK((engine.steps == std::vector<std::string>{ "build", "sync", "move 0", "move 1", "attach", "commit" }));
}

TEST(phases_add_up_to_the_pause) {
    fake_engine engine(16384, 2);
    engine.hold(0, 100);

    const int64_t t_before = engine.now;
    const auto    res      = reconfigure(engine, ask(32768));

    CHECK_EQ(res.t_pause_us(), res.t_sync_us + res.t_page_out_us + res.t_page_in_us + res.t_attach_us + res.t_swap_us);
    CHECK_EQ(res.t_page_in_us, 4);
    CHECK(res.t_pause_us() > 0);
    CHECK(res.t_pause_us() + res.t_wait_us <= engine.now - t_before);
}

TEST(a_field_left_out_keeps_its_effective_value) {
    fake_engine engine(10752, 3);

    const auto res = reconfigure(engine, ask(std::nullopt, 4));

    CHECK(res.outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK_EQ(res.geometry.n_ctx, 11264); // 10752 / 4 = 2688, rounded up to 2816 = 11 * 256
    CHECK_EQ(res.geometry.n_ctx_seq, 2816);
}

TEST(values_are_rounded_as_libllama_does) {
    fake_engine engine(16384, 2);

    CHECK_EQ(reconfigure(engine, ask(10000, 3)).geometry.n_ctx, 10752);
    CHECK_EQ(reconfigure(engine, ask(1000, 3)).geometry.n_ctx, 1536);
    CHECK_EQ(reconfigure(engine, ask(1, 1)).geometry.n_ctx, 256);

    geometry_request unified = ask(1000, 4);
    unified.kv_unified = true;
    const auto res = reconfigure(engine, unified);
    CHECK_EQ(res.geometry.n_ctx, 1024);
    CHECK_EQ(res.geometry.n_ctx_seq, 1024);
    CHECK(res.geometry.kv_unified);
}

TEST(what_is_asked_again_is_unchanged_and_touches_nothing) {
    fake_engine engine(10752, 3);
    engine.hold(0, 5);

    for (const auto & request : { ask(10752, 3), ask(10000, 3), ask(std::nullopt), ask(std::nullopt, 3) }) {
        const auto res = reconfigure(engine, request);
        CHECK(res.outcome == SERVER_RECONFIGURE_OUTCOME_UNCHANGED);
        CHECK_EQ(res.geometry.n_ctx, 10752);
    }
    CHECK(engine.steps.empty());
}

TEST(the_servers_own_cap_of_a_slot_counts) {
    fake_engine engine(16384, 2, true);
    engine.lim.n_ctx_slot_max = 4096;

    CHECK_EQ(reconfigure(engine, ask(32768)).geometry.n_ctx_slot, 4096);
}

TEST(values_out_of_range_are_invalid) {
    const std::pair<geometry_request, const char *> cases[] = {
        { ask(0),                    "n_ctx" },
        { ask(-1),                   "n_ctx" },
        { ask(1000000000000),        "n_ctx" },
        { ask(INT64_MAX),            "n_ctx" },
        { ask(INT64_MIN),            "n_ctx" },
        { ask(2147483391, 256),      "n_ctx" }, // in range as it is asked for, not when it is rounded up
        { ask(std::nullopt, 0),      "n_seq" },
        { ask(std::nullopt, -3),     "n_seq" },
        { ask(std::nullopt, 257),    "n_seq" },
    };
    for (const auto & [request, field] : cases) {
        fake_engine engine(16384, 2);
        const auto  res = reconfigure(engine, request);
        check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
        CHECK_EQ(server_reconfigure_reason_status(res.reason), 400);
        CHECK(res.message.find(field) != std::string::npos);
        CHECK(engine.steps.empty());
    }
}

TEST(more_sequences_than_a_batch_holds_are_invalid) {
    fake_engine engine(16384, 2);
    engine.lim.n_batch = 8;

    CHECK(reconfigure(engine, ask(std::nullopt, 8)).outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);

    const auto res = reconfigure(engine, ask(std::nullopt, 9));
    check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
    CHECK_EQ(res.details.at("n_batch"), 8);
    CHECK_EQ(res.details.at("n_seq"), 9);
}

TEST(a_batch_is_no_larger_than_the_context) {
    fake_engine engine(65536, 2, true);
    engine.lim.n_seq_max = 1024;

    const auto res = reconfigure(engine, ask(256, 257));
    check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
    CHECK_EQ(res.details.at("n_batch"), 256);
}

TEST(a_kv_type_change_is_a_cold_start) {
    fake_engine engine(16384, 2);

    geometry_request request = ask(32768);
    request.cache_type_k = "q8_0";
    const auto res = reconfigure(engine, request);
    check_refused(res, SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE);
    CHECK_EQ(server_reconfigure_reason_status(res.reason), 409);

    request.cache_type_k = "f16"; // the type it has is no change
    CHECK(reconfigure(engine, request).outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);
}

TEST(a_slot_that_would_be_gone_is_named) {
    fake_engine engine(32768, 4);
    engine.hold(3, 6000);

    const auto res = reconfigure(engine, ask(std::nullopt, 2));
    check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
    CHECK_EQ(res.details.at("slot"), 3);
    CHECK_EQ(res.details.at("tokens_held"), 6000);
    CHECK(res.message.find("slot 3") != std::string::npos);
    CHECK(engine.steps.empty());
    CHECK_EQ(engine.held[3], 6000);
}

TEST(a_state_fits_exactly_or_not_at_all) {
    fake_engine engine(16384, 2);
    engine.hold(0, 2048);

    CHECK(reconfigure(engine, ask(4096)).outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);

    engine.loads[0].n_need = 2049;
    engine.serving.n_ctx_slot = 8192;
    engine.serving.n_ctx = 16384;
    const auto res = reconfigure(engine, ask(4096));
    check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
    CHECK_EQ(res.details.at("tokens_needed"), 2049);
    CHECK_EQ(res.details.at("tokens_fit"), 2048);
}

TEST(a_request_too_long_for_the_old_window_does_not_block_a_grow) {
    fake_engine engine(4096, 2);
    engine.loads[1].n_need = 100000; // it gets its own error when its turn comes

    CHECK(reconfigure(engine, ask(8192)).outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);
}

TEST(a_unified_cache_holds_the_sum) {
    fake_engine engine(8192, 4, true);
    for (int32_t id = 0; id < 4; id++) {
        engine.hold(id, 1024);
    }

    CHECK(reconfigure(engine, ask(4096)).outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);

    const auto res = reconfigure(engine, ask(3840));
    check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
    CHECK_EQ(res.details.at("tokens_needed"), 4096);
    CHECK_EQ(res.details.at("tokens_fit"), 3840);
}

TEST(media_and_fan_out_are_refused_by_name) {
    fake_engine engine(16384, 2);
    engine.loads[1].has_media = true;
    check_refused(reconfigure(engine, ask(32768)), SERVER_RECONFIGURE_REASON_MEDIA_HELD);

    engine.loads[1].has_media        = false;
    engine.loads[1].waits_for_parent = true;
    check_refused(reconfigure(engine, ask(32768)), SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS);
    CHECK(engine.steps.empty());
}

TEST(memory_is_checked_before_the_build_and_after_it) {
    fake_engine engine(16384, 2);
    engine.lim.memory_bytes = 131072 * 64 - 1;

    auto res = reconfigure(engine, ask(131072));
    check_refused(res, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY);
    CHECK_EQ(res.details.at("bytes_needed"), 131072 * 64);
    CHECK_EQ(res.details.at("bytes_available"), 131072 * 64 - 1);
    CHECK(engine.steps.empty());

    // the cells fit, the buffers do not
    engine.lim.cell_bytes   = 0;
    engine.lim.memory_bytes = 999;
    res = reconfigure(engine, ask(131072));
    check_refused(res, SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY);
    CHECK_EQ(res.details.at("bytes_needed"), 1000);
    CHECK_EQ(engine.n_discards, 1);
    CHECK_EQ(engine.serving.n_ctx, 16384);
}

TEST(a_failure_at_any_step_leaves_everything_as_it_was) {
    struct { const char * step; int32_t slot; server_reconfigure_reason reason; } cases[] = {
        { "build",  -1, SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED },
        { "sync",   -1, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED },
        { "move",    0, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED },
        { "move",    1, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED },
        { "attach", -1, SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED },
    };
    for (const auto & c : cases) {
        fake_engine engine(16384, 2);
        engine.hold(0, 11);
        engine.hold(1, 22);
        engine.fail_at   = c.step;
        engine.fail_slot = c.slot;

        const auto before = engine.serving;
        const auto res    = reconfigure(engine, ask(131072, 4));

        check_refused(res, c.reason);
        CHECK(res.message.find("injected") != std::string::npos || std::string(c.step) == "sync");
        CHECK(res.geometry == before);
        CHECK(engine.serving == before);
        CHECK_EQ(engine.held[0], 11);
        CHECK_EQ(engine.held[1], 22);
        CHECK_EQ(engine.n_commits, 0);
        CHECK_EQ(engine.n_discards, 1);
        CHECK(!engine.has_build);

        // and the next one works
        engine.fail_at = "";
        CHECK(reconfigure(engine, ask(131072, 4)).outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);
        CHECK_EQ(engine.held[1], 22);
    }
}

TEST(a_slot_that_grew_during_the_build_is_checked_again) {
    fake_engine engine(16384, 2);
    engine.hold(0, 2000);

    server_reconfigure_plan   plan;
    server_reconfigure_result res;
    CHECK(server_reconfigure_begin(engine, ask(4096), plan, res));
    const auto build = engine.build(plan.next);

    engine.hold(0, 2100);
    res = server_reconfigure_finish(engine, plan, build);

    check_refused(res, SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY);
    CHECK_EQ(engine.n_discards, 1);
    CHECK_EQ(engine.serving.n_ctx, 16384);
    CHECK_EQ(engine.held[0], 2100);
}

TEST(a_dry_run_builds_and_forgets) {
    fake_engine engine(16384, 2);
    engine.hold(0, 7);

    geometry_request request = ask(32768);
    request.dry_run = true;
    const auto res = reconfigure(engine, request);

    CHECK(res.outcome == SERVER_RECONFIGURE_OUTCOME_PLANNED);
    CHECK_EQ(res.bytes_needed.at("CPU"), 1000);
    CHECK_EQ(res.geometry.n_ctx, 32768);
    CHECK_EQ(res.t_pause_us(), 0);
    CHECK_EQ(engine.serving.n_ctx, 16384);
    CHECK((engine.steps == std::vector<std::string>{ "build" }));
    CHECK_EQ(engine.n_discards, 1);
}

TEST(idle_empty_slots_are_not_moved) {
    fake_engine engine(16384, 2);

    const auto res = reconfigure(engine, ask(8192, 1));
    CHECK(res.outcome == SERVER_RECONFIGURE_OUTCOME_APPLIED);
    CHECK(res.slots.empty());
    CHECK_EQ(res.n_bytes_held, 0);
    CHECK((engine.steps == std::vector<std::string>{ "build", "sync", "attach", "commit" }));
}
