// sources: server-page-store.cpp

#include "server-page-store.h"

#include "testing.h"

#include <string>
#include <thread>

namespace {

struct page final : server_page_base {
    page(const std::string & name, size_t n_bytes) {
        this->name    = name;
        this->n_bytes = n_bytes;
    }
};

std::shared_ptr<server_page_base> make(const std::string & name, size_t n_bytes) {
    return std::make_shared<page>(name, n_bytes);
}

std::string names(const server_page_store & store) {
    std::string res;
    for (const auto & page : store.list()) {
        res += (res.empty() ? "" : " ") + page->name;
    }
    return res;
}

}

TEST(what_is_put_is_charged_and_found) {
    server_page_store store(100);

    CHECK(store.put(make("b", 60)));
    CHECK(store.put(make("a", 40)));
    CHECK_EQ(store.used(), 100u);
    CHECK_EQ(names(store), std::string("b a"));
    CHECK_EQ(store.get("a")->n_bytes, 40u);
    CHECK(store.get("c") == nullptr);
}

TEST(the_ceiling_holds_to_the_byte) {
    server_page_store store(100);

    CHECK(!store.put(make("a", 101)));
    CHECK(store.put(make("a", 60)));
    CHECK(store.reserve("b", 40) != nullptr);
    CHECK(store.reserve("b", 41) == nullptr);
    CHECK(!store.put(make("b", 41)));
    CHECK_EQ(store.used(), 60u);
    CHECK_EQ(names(store), std::string("a"));
    CHECK(store.put(make("b", 40)));
    CHECK(!store.put(make("c", 1)));
    CHECK(store.put(make("c", 0)));
    CHECK(store.reserve("d", SIZE_MAX) == nullptr);
}

TEST(no_ceiling_admits_everything_and_counts_it) {
    server_page_store store;

    CHECK(store.put(make("a", size_t(1) << 60)));
    CHECK_EQ(store.used(), size_t(1) << 60);
}

TEST(a_page_gives_its_bytes_back_with_its_last_owner) {
    server_page_store store(100);
    CHECK(store.put(make("a", 60)));

    auto held = store.get("a");
    auto removed = store.remove("a");
    CHECK(store.get("a") == nullptr);
    CHECK(store.remove("a") == nullptr);
    CHECK_EQ(store.used(), 60u);

    removed.reset();
    CHECK_EQ(store.used(), 60u);
    CHECK(store.reserve("b", 60) == nullptr);

    held.reset();
    CHECK_EQ(store.used(), 0u);
    CHECK(store.reserve("b", 100) != nullptr);
}

TEST(a_successor_takes_the_place_of_what_only_the_store_owns) {
    server_page_store store(100);
    CHECK(store.put(make("a", 80)));
    CHECK(store.put(make("a", 90)));
    CHECK_EQ(store.used(), 90u);

    const auto held = store.get("a"); // somebody still works with it
    CHECK(store.reserve("a", 11) == nullptr);
    CHECK(!store.put(make("a", 90)));
    CHECK_EQ(store.get("a")->n_bytes, 90u);
    CHECK(store.put(make("a", 10)));
    CHECK_EQ(store.used(), 100u);
    CHECK_EQ(held->n_bytes, 90u);
}

TEST(a_successor_that_does_not_fit_leaves_the_incumbent) {
    server_page_store store(100);
    CHECK(store.put(make("a", 80)));
    CHECK(store.put(make("b", 20)));
    CHECK(!store.put(make("a", 81)));
    CHECK_EQ(store.get("a")->n_bytes, 80u);
    CHECK_EQ(store.used(), 100u);
}

TEST(memory_is_charged_before_it_is_taken) {
    server_page_store store(100);

    auto charge = store.reserve("a", 60);
    CHECK(charge != nullptr);
    CHECK_EQ(store.used(), 60u);
    CHECK(store.reserve("b", 41) == nullptr);
    charge.reset();
    CHECK_EQ(store.used(), 0u);
}

TEST(what_is_stored_is_what_is_charged) {
    server_page_store store(100);

    const auto smaller = make("a", 50);
    smaller->charge = store.reserve("a", 60);
    CHECK(store.put(smaller));
    CHECK_EQ(store.used(), 50u);

    // it has grown past what was reserved, and past what there is
    const auto larger = make("b", 51);
    larger->charge = store.reserve("b", 40);
    CHECK(!store.put(larger));
    CHECK_EQ(store.used(), 90u);
    CHECK_EQ(names(store), std::string("a"));

    larger->n_bytes = 50;
    CHECK(store.put(larger));
    CHECK_EQ(store.used(), 100u);
}

TEST(one_page_at_a_time_passes_the_ceiling_on_its_way) {
    server_page_store store(100);
    CHECK(store.put(make("a", 80)));

    auto successor = make("a", 90);
    successor->charge = store.reserve("a", 90);
    CHECK(successor->charge != nullptr);
    CHECK_EQ(store.used(), 170u);

    // neither another successor nor a copy
    CHECK(store.reserve("a", 90) == nullptr);
    CHECK(store.reserve_passing(50) == nullptr);

    std::shared_ptr<server_page_base> replaced;
    CHECK(store.put(successor, false, &replaced));
    CHECK_EQ(replaced->n_bytes, 80u);
    CHECK_EQ(store.used(), 170u); // until who was given it lets it go
    replaced.reset();
    CHECK_EQ(store.used(), 90u);

    auto copy = store.reserve_passing(50);
    CHECK(copy != nullptr);
    CHECK_EQ(store.used(), 140u);
    CHECK(store.reserve_passing(50) == nullptr);
    copy.reset();
    CHECK(store.reserve_passing(50) != nullptr);
    CHECK(store.reserve_passing(10) != nullptr); // this one fits
}

TEST(a_copy_that_turns_out_to_fit_lets_the_next_one_pass) {
    server_page_store store(100);

    auto copy = make("file", 100);
    copy->charge = store.reserve_passing(110); // as much as its files take
    CHECK(copy->charge != nullptr);
    CHECK(store.reserve_passing(100) == nullptr);
    store.settle(*copy);
    CHECK_EQ(store.used(), 100u);
    CHECK(store.reserve_passing(100) != nullptr);

    copy->n_bytes = 101;
    store.settle(*copy); // what is there is counted, whether it fits or not
    CHECK_EQ(store.used(), 101u);
}

TEST(a_successor_that_was_given_up_lets_the_next_one_pass) {
    server_page_store store(100);
    CHECK(store.put(make("a", 80)));

    auto charge = store.reserve("a", 90);
    CHECK(charge != nullptr);
    charge.reset();
    CHECK(store.reserve("a", 90) != nullptr);
    CHECK_EQ(store.used(), 80u);
}

TEST(what_must_not_be_lost_goes_over_the_ceiling) {
    server_page_store store(100);
    CHECK(store.put(make("a", 80)));
    CHECK(store.put(make("b", 80), true));
    CHECK_EQ(store.used(), 160u);
    CHECK(store.reserve("c", 1) == nullptr);
    store.remove("a");
    CHECK_EQ(store.used(), 80u);
    CHECK(store.reserve("c", 20) != nullptr);
}

TEST(a_page_may_outlive_its_store) {
    std::shared_ptr<server_page_base> held;
    {
        server_page_store store(100);
        CHECK(store.put(make("a", 60)));
        held = store.get("a");
    }
    CHECK_EQ(held->name, std::string("a"));
    held.reset();
}

TEST(many_threads_never_pass_the_ceiling_and_leave_nothing_behind) {
    server_page_store store(1000);

    // no name is replaced here: a page and its successor are both there until the last owner of the first has let it go
    const auto work = [&](int who) {
        for (int i = 0; i < 2000; ++i) {
            const auto name = std::string(1, char('a' + who)) + std::to_string(i % 5);
            store.remove(name);
            if (i % 3 != 2) {
                store.put(make(name, (who * 37 + i * 101) % 400));
            }
            CHECK(store.used() <= 1000);
            store.list();
        }
    };

    std::vector<std::thread> threads;
    for (int who = 0; who < 4; ++who) {
        threads.emplace_back(work, who);
    }
    for (auto & thread : threads) {
        thread.join();
    }

    size_t n_bytes = 0;
    for (const auto & page : store.list()) {
        n_bytes += page->n_bytes;
    }
    CHECK(n_bytes > 0);
    CHECK_EQ(store.used(), n_bytes);

    for (const auto & page : store.list()) {
        store.remove(page->name);
    }
    CHECK_EQ(store.used(), 0u);
}

TEST(names_that_are_paths_suffixes_or_ours_are_none) {
    const std::vector<std::string> good = { "a", "fox-2", "A.b_c", "x.ckpt2", "parked", std::string(128, 'x') };
    for (const auto & name : good) {
        CHECK_EQ(server_page_name_error(name), std::string());
    }

    const std::vector<std::string> bad = {
        "", "../x", "/x", "a/b", ".x", "-x", "x.ckpt", "x.lora", "x.dft", "x.page-staging", "parked-1", std::string(129, 'x'),
        std::string("a\0b", 3), "a b", "\xc3\xa4", "x\n",
    };
    for (const auto & name : bad) {
        CHECK(!server_page_name_error(name).empty());
    }
}
