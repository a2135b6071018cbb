// sources: server-geometry.cpp

// What a request for a geometry comes to: rounding, caps and bounds.

#include "server-geometry.h"
#include "testing.h"

static server_geometry geometry_of(int64_t n_ctx, int64_t n_seq, int64_t n_ctx_seq, int64_t n_ctx_slot, bool kv_unified = false) {
    server_geometry res;
    res.n_ctx        = n_ctx;
    res.n_seq        = n_seq;
    res.n_ctx_seq    = n_ctx_seq;
    res.n_ctx_slot   = n_ctx_slot;
    res.kv_unified   = kv_unified;
    res.cache_type_k = "f16";
    res.cache_type_v = "f16";
    return res;
}

static const server_geometry current = geometry_of(10752, 3, 3584, 3584);

static server_geometry_limits limits_of_a_model() {
    server_geometry_limits res;
    res.n_batch     = 2048;
    res.n_seq_max   = 256;
    res.n_ctx_train = 8192;
    res.cache_types = { "f16", "q8_0" };
    return res;
}

static server_geometry_request ask(std::optional<int64_t> n_ctx, std::optional<int64_t> n_seq = {}, std::optional<bool> kv_unified = {}) {
    server_geometry_request res;
    res.n_ctx      = n_ctx;
    res.n_seq      = n_seq;
    res.kv_unified = kv_unified;
    return res;
}

static server_geometry resolved(const server_geometry_request & request, const server_geometry_limits & limits = limits_of_a_model()) {
    server_geometry       res;
    server_geometry_error error;
    CHECK(server_geometry_resolve(current, limits, request, res, error));
    CHECK(error.message.empty());
    return res;
}

static server_geometry_error invalid(const server_geometry_request & request, const server_geometry_limits & limits = limits_of_a_model()) {
    server_geometry       next;
    server_geometry_error res;
    CHECK(!server_geometry_resolve(current, limits, request, next, res));
    CHECK(!res.message.empty());
    return res;
}

TEST(a_field_left_out_keeps_its_effective_value) {
    CHECK(resolved({}) == current);
    CHECK(resolved(ask({}, 3)) == current);
    CHECK(resolved(ask(10752)) == current);
    CHECK(resolved(ask({}, {}, false)) == current);

    server_geometry_request types;
    types.cache_type_k = "f16";
    CHECK(resolved(types) == current);

    types.cache_type_v = "q8_0";
    CHECK_EQ(resolved(types).cache_type_k, "f16");
    CHECK_EQ(resolved(types).cache_type_v, "q8_0");
}

TEST(every_field_makes_another_geometry) {
    const auto differs = [](auto && change) {
        auto other = current;
        change(other);
        return !(other == current) && other == other;
    };
    CHECK(differs([](auto & g) { g.n_ctx++; }));
    CHECK(differs([](auto & g) { g.n_seq++; }));
    CHECK(differs([](auto & g) { g.n_ctx_seq++; }));
    CHECK(differs([](auto & g) { g.n_ctx_slot++; }));
    CHECK(differs([](auto & g) { g.kv_unified = true; }));
    CHECK(differs([](auto & g) { g.cache_type_k = "q8_0"; }));
    CHECK(differs([](auto & g) { g.cache_type_v = "q8_0"; }));
}

TEST(cells_are_rounded_up_as_libllama_does) {
    // asked for, sequences, and the geometry of it
    const std::pair<server_geometry_request, server_geometry> cases[] = {
        { ask(1, 1),           geometry_of(256,    1, 256,   256) },
        { ask(256, 1),         geometry_of(256,    1, 256,   256) },
        { ask(257, 1),         geometry_of(512,    1, 512,   512) },
        { ask(1000, 3),        geometry_of(1536,   3, 512,   512) },  // 1024 / 3 is 341
        { ask(10000, 3),       geometry_of(10752,  3, 3584,  3584) },
        { ask({}, 4),          geometry_of(11264,  4, 2816,  2816) }, // 10752 / 4 is 2688
        { ask(131072, 4),      geometry_of(131072, 4, 32768, 8192) }, // the training context
        { ask(1, 256),         geometry_of(65536, 256, 256,  256) },
        { ask(1000, 4, true),  geometry_of(1024,   4, 1024,  1024, true) },
        { ask(1, 256, true),   geometry_of(256,  256, 256,   256,  true) },
        { ask({}, {}, true),   geometry_of(10752,  3, 10752, 8192, true) },
    };
    for (const auto & [request, expected] : cases) {
        const auto next = resolved(request);
        CHECK_EQ(next.n_ctx,      expected.n_ctx);
        CHECK_EQ(next.n_ctx_seq,  expected.n_ctx_seq);
        CHECK_EQ(next.n_ctx_slot, expected.n_ctx_slot);
        CHECK(next == expected);
    }
}

TEST(what_came_out_comes_out_again) {
    for (int64_t n_ctx = 1; n_ctx < 40000; n_ctx += 97) {
        for (int64_t n_seq = 1; n_seq <= 17; ++n_seq) {
            for (const bool kv_unified : { false, true }) {
                const auto next = resolved(ask(n_ctx, n_seq, kv_unified));
                CHECK(next.n_ctx >= n_ctx);
                CHECK_EQ(next.n_ctx_seq % 256, 0);
                CHECK_EQ(next.n_ctx, next.n_ctx_seq * (kv_unified ? 1 : n_seq));
                CHECK(resolved(ask(next.n_ctx, n_seq, kv_unified)) == next);
            }
        }
    }
}

TEST(the_servers_own_cap_of_a_slot_counts_where_it_is_the_smallest) {
    auto limits = limits_of_a_model();

    limits.n_ctx_slot_max = 4096;
    CHECK_EQ(resolved(ask(32768, 2), limits).n_ctx_slot, 4096);
    CHECK_EQ(resolved(ask(32768, 2), limits).n_ctx_seq, 16384);
    CHECK_EQ(resolved(ask(2048, 2), limits).n_ctx_slot, 1024);

    limits.n_ctx_slot_max = 100000;
    CHECK_EQ(resolved(ask(32768, 2), limits).n_ctx_slot, 8192);
}

TEST(values_out_of_range_are_named_with_the_bounds) {
    for (const int64_t n : { INT64_MIN, INT64_MIN + 1, (int64_t) INT32_MIN, (int64_t) -1, (int64_t) 0,
                             (int64_t) INT32_MAX - 255, (int64_t) INT32_MAX, (int64_t) UINT32_MAX + 2, INT64_MAX - 1, INT64_MAX }) {
        for (const bool kv_unified : { false, true }) {
            const auto error = invalid(ask(n, 1, kv_unified));
            CHECK(error.message.find("n_ctx") == 0);
            CHECK_EQ(error.details.at("n_ctx"), n);
            CHECK_EQ(error.details.at("n_ctx_min"), 1);
            CHECK_EQ(error.details.at("n_ctx_max"), INT32_MAX - 256);
        }
    }
    for (const int64_t n : { INT64_MIN, (int64_t) -3, (int64_t) 0, (int64_t) 257, (int64_t) UINT32_MAX + 2, INT64_MAX }) {
        const auto error = invalid(ask({}, n));
        CHECK(error.message.find("n_seq") == 0);
        CHECK_EQ(error.details.at("n_seq"), n);
        CHECK_EQ(error.details.at("n_seq_min"), 1);
        CHECK_EQ(error.details.at("n_seq_max"), 256);
    }
}

TEST(a_context_is_counted_after_the_rounding) {
    const int64_t n_ctx_largest = (INT32_MAX - 256) / 256 * 256;

    CHECK_EQ(resolved(ask(n_ctx_largest, 1)).n_ctx, n_ctx_largest);
    CHECK_EQ(resolved(ask(n_ctx_largest, 1, true)).n_ctx, n_ctx_largest);

    // in range as it is asked for
    for (const auto & request : { ask(n_ctx_largest, 256), ask(INT32_MAX - 256, 1), ask(INT32_MAX - 256, 1, true) }) {
        const auto error = invalid(request);
        CHECK(error.message.find("rounded up") != std::string::npos);
        CHECK(error.details.at("n_ctx") > error.details.at("n_ctx_max"));
    }
}

TEST(a_batch_has_an_output_for_each_sequence) {
    auto limits = limits_of_a_model();
    limits.n_batch = 8;

    CHECK_EQ(resolved(ask({}, 8), limits).n_seq, 8);

    const auto error = invalid(ask({}, 9), limits);
    CHECK(error.message.find("n_batch") != std::string::npos);
    CHECK_EQ(error.details.at("n_seq"), 9);
    CHECK_EQ(error.details.at("n_batch"), 8);
}

TEST(a_batch_is_no_larger_than_the_context) {
    auto limits = limits_of_a_model();
    limits.n_seq_max = 1024;

    CHECK_EQ(resolved(ask(1, 256, true), limits).n_ctx, 256);
    CHECK_EQ(invalid(ask(256, 257, true), limits).details.at("n_batch"), 256);
    CHECK_EQ(invalid(ask(256, 257), limits).details.at("n_batch"), 0); // not one cell for each
}

TEST(cache_types_are_names_from_the_list) {
    server_geometry_request request;
    for (const char * name : { "", "f17", "F16", "q8_0 ", "f16, q8_0" }) {
        request.cache_type_k = name;
        request.cache_type_v = "f16";
        auto error = invalid(request);
        CHECK_EQ(error.message, "cache_type_k has to be one of f16, q8_0, got '" + std::string(name) + "'");

        std::swap(request.cache_type_k, request.cache_type_v);
        error = invalid(request);
        CHECK(error.message.find("cache_type_v ") == 0);
        CHECK(error.details.empty());
    }
}
