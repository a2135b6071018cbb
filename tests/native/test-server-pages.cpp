// sources: server-pages.cpp server-page-store.cpp

#include "server-pages.h"

#include "testing.h"

#include <new>
#include <string>

namespace {

// a slot, as far as the steps of a verb see it
struct fake_server {
    server_page_store store;

    int64_t n_tokens      = 1;
    int64_t n_bytes_state = 60; // of what the slot holds
    int64_t n_bytes_more  = 5;  // of its checkpoints

    int n_grown   = 0; // times that the slot is used between two steps
    int n_no_page = 0; // allocations that fail
    bool gone     = false; // the client, at the second step

    std::string steps; // that were run
    size_t used_at_step = 0; // what is charged when the verb itself is done

    explicit fake_server(size_t ceiling) : store(ceiling) {}

    std::optional<server_page_result> run(const server_page_request & request) {
        server_page_result res;
        res.id_slot             = request.id_slot;
        res.name                = request.name;
        res.n_tokens            = n_tokens;
        res.n_bytes_target      = n_bytes_state;
        res.n_bytes_checkpoints = n_bytes_more;

        switch (request.op) {
            case SERVER_PAGE_OP_MEASURE: steps += "measure "; return res;
            case SERVER_PAGE_OP_PREPARE: steps += "prepare "; return res;
            case SERVER_PAGE_OP_OUT:     steps += "out ";     break;
            case SERVER_PAGE_OP_COPY:    steps += "copy ";    break;
            case SERVER_PAGE_OP_IN:      steps += "in ";      break;
            case SERVER_PAGE_OP_DROP:    steps += "drop ";    return res;
            case SERVER_PAGE_OP_HOLD:    steps += "hold ";    res.held = store.get(request.name); return res;
        }

        used_at_step = store.used();
        if (gone) {
            return std::nullopt;
        }
        if (n_grown > 0) {
            n_grown--;
            n_bytes_state += 10;
            res.retry = true;
            return res;
        }
        if (request.op == SERVER_PAGE_OP_OUT) {
            request.page->name    = request.name;
            request.page->n_bytes = res.n_bytes();
            CHECK(store.put(request.page, false, &res.held));
        }
        return res;
    }

    server_page_steps with() {
        return {
            store,
            [this](const server_page_request & request) { return run(request); },
            [this](size_t n_bytes, server_pace) {
                CHECK_EQ((int64_t) n_bytes, n_bytes_state);
                CHECK(store.limit() == 0 || store.used() > 0); // charged before it is taken
                if (n_no_page > 0) {
                    n_no_page--;
                    throw std::bad_alloc();
                }
                return std::make_shared<server_page_base>();
            },
        };
    }
};

server_page_request named(const std::string & name) {
    server_page_request res;
    res.id_slot = 1;
    res.name    = name;
    return res;
}

std::string reason(const std::optional<server_page_result> & res) {
    return res ? server_page_reason_name(res->reason) : "gone";
}

}

TEST(a_page_out_is_measured_given_memory_and_done) {
    fake_server server(100);

    const auto res = server_page_out(server.with(), named("a"));
    CHECK_EQ(reason(res), std::string("none"));
    CHECK_EQ(server.steps, std::string("measure out "));
    CHECK_EQ(server.used_at_step, 65u);
    CHECK_EQ(server.store.used(), 65u);
    CHECK_EQ(server.store.get("a")->n_bytes, 65u);
}

TEST(a_slot_that_was_used_between_the_steps_is_measured_again) {
    fake_server server(100);
    server.n_grown = 2;

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("none"));
    CHECK_EQ(server.steps, std::string("measure out measure out measure out "));
    CHECK_EQ(server.used_at_step, 85u); // nothing of the earlier tries is still charged
    CHECK_EQ(server.store.used(), 85u);
}

TEST(a_slot_that_is_always_used_is_given_up) {
    fake_server server(0);
    server.n_grown = 1000;

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("page_failed"));
    CHECK_EQ(server.store.used(), 0u);
}

TEST(past_the_ceiling_no_memory_is_taken) {
    fake_server server(64);

    const auto res = server_page_out(server.with(), named("a"));
    CHECK_EQ(reason(res), std::string("page_ceiling"));
    CHECK_EQ(res->details.at("bytes_needed"), 65);
    CHECK_EQ(res->details.at("bytes_used"), 0);
    CHECK_EQ(res->details.at("bytes_ceiling"), 64);
    CHECK_EQ(server.steps, std::string("measure "));
    CHECK_EQ(server.store.used(), 0u);
}

TEST(a_slot_that_grows_past_the_ceiling_meanwhile_is_refused) {
    fake_server server(70);
    server.n_grown = 1;

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("page_ceiling"));
    CHECK_EQ(server.steps, std::string("measure out measure "));
    CHECK_EQ(server.store.used(), 0u);
}

TEST(memory_that_is_not_there_is_an_answer) {
    fake_server server(100);
    server.n_no_page = 1;

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("insufficient_memory"));
    CHECK_EQ(server.store.used(), 0u);
    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("none"));
}

TEST(a_successor_is_captured_beside_its_incumbent) {
    fake_server server(100);

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("none"));
    {
        const auto res = server_page_out(server.with(), named("a"));
        CHECK_EQ(reason(res), std::string("none"));
        CHECK_EQ(server.used_at_step, 130u);
    }
    CHECK_EQ(server.store.used(), 65u);
    CHECK_EQ(reason(server_page_out(server.with(), named("b"))), std::string("page_ceiling"));
}

TEST(a_client_that_leaves_takes_its_memory_along) {
    fake_server server(100);
    server.gone = true;

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("gone"));
    CHECK_EQ(server.store.used(), 0u);
}

TEST(a_page_in_keeps_what_the_slot_holds_until_it_is_in) {
    fake_server server(100);

    CHECK_EQ(reason(server_page_in(server.with(), named("a"))), std::string("none"));
    CHECK_EQ(server.steps, std::string("prepare in "));
    CHECK_EQ(server.used_at_step, 60u); // its checkpoints stay where they are
    CHECK_EQ(server.store.used(), 0u);
}

TEST(an_empty_slot_takes_no_copy_of_what_it_holds) {
    fake_server server(65);
    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("none"));

    // the one that may pass is on its way already
    const auto passing = server.store.reserve_passing(65);
    CHECK(passing != nullptr);
    CHECK_EQ(reason(server_page_in(server.with(), named("a"))), std::string("page_ceiling"));
    server.n_tokens = 0;
    CHECK_EQ(reason(server_page_in(server.with(), named("a"))), std::string("none"));
}

TEST(a_full_store_does_not_keep_a_page_from_going_in_or_a_slot_from_being_saved) {
    fake_server server(65);

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("none"));
    CHECK_EQ(reason(server_page_in(server.with(), named("a"))), std::string("none"));
    CHECK_EQ(server.used_at_step, 125u);
    {
        const auto copy = server_page_copy(server.with(), named("file"));
        CHECK_EQ(reason(copy), std::string("none"));
        CHECK(copy->held != nullptr);
        CHECK_EQ(server.store.used(), 130u);
        CHECK_EQ(reason(server_page_copy(server.with(), named("other"))), std::string("page_ceiling"));
    }
    CHECK_EQ(server.store.used(), 65u);
}

TEST(a_page_that_is_held_counts_until_it_is_let_go) {
    fake_server server(100);

    CHECK_EQ(reason(server_page_out(server.with(), named("a"))), std::string("none"));
    auto held = server_page_hold(server.with(), named("a"));
    server.store.remove("a");
    CHECK_EQ(server.store.used(), 65u);
    CHECK_EQ(reason(server_page_out(server.with(), named("b"))), std::string("page_ceiling"));
    held.reset();
    CHECK_EQ(server.store.used(), 0u);
}

TEST(names_and_slots_are_checked_before_any_step) {
    fake_server server(100);

    for (const std::string name : { "", "../x", "/etc/passwd", "x.ckpt", "a b" }) {
        CHECK_EQ(reason(server_page_out(server.with(), named(name))), std::string("bad_name"));
    }
    CHECK_EQ(reason(server_page_in  (server.with(), named(""))), std::string("bad_name"));
    CHECK_EQ(reason(server_page_drop(server.with(), named(""))), std::string("bad_name"));
    CHECK_EQ(reason(server_page_hold(server.with(), named(""))), std::string("bad_name"));
    CHECK_EQ(server.steps, std::string());

    server_page_request request;
    for (const std::string slot : { "", "-1", "+1", " 1", "x", "1x", "99999999999999999999", "2147483648" }) {
        CHECK_EQ(reason(server_page_slot_error(slot, request)), std::string("bad_slot"));
    }
    CHECK(!server_page_slot_error("12", request));
    CHECK_EQ(request.id_slot, 12);
}
