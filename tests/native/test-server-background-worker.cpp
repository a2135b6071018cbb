// sources: server-background-worker.cpp

// The thread beside decoding: order, waiting, and what is left when it stops.

#include "server-background-worker.h"
#include "testing.h"

#include <atomic>
#include <future>
#include <memory>

TEST(jobs_are_done_in_order_on_one_thread) {
    std::vector<int>             order;
    std::vector<std::thread::id> threads;

    server_background_worker worker;
    for (int i = 0; i < 100; i++) {
        worker.post([&, i]() {
            order.push_back(i);
            threads.push_back(std::this_thread::get_id());
        });
    }
    worker.wait();

    CHECK_EQ(order.size(), 100u);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(order[i], i);
        CHECK(threads[i] == threads[0]);
    }
    CHECK(threads[0] != std::this_thread::get_id());
}

TEST(wait_returns_at_once_where_nothing_was_posted) {
    server_background_worker worker;
    worker.wait();
}

TEST(wait_does_not_wait_for_done) {
    std::promise<void> release;
    std::atomic<bool>  done = false;

    server_background_worker worker;
    worker.post([]() {}, [&]() {
        release.get_future().wait();
        done = true;
    });
    worker.wait(); // would never return

    CHECK(!done);
    release.set_value();
}

TEST(what_a_job_holds_is_freed_before_it_has_ended) {
    auto                held = std::make_shared<int>(7);
    std::weak_ptr<int>  weak = held;

    server_background_worker worker;
    worker.post([held = std::move(held)]() {});
    worker.wait();

    CHECK(weak.expired());
}

TEST(jobs_that_are_left_are_done_when_it_stops) {
    std::promise<void> release;
    int                n_done = 0;
    {
        server_background_worker worker;
        worker.post([&]() { release.get_future().wait(); });
        for (int i = 0; i < 10; i++) {
            worker.post([&]() { n_done++; });
        }
        release.set_value();
    }
    CHECK_EQ(n_done, 10);
}
