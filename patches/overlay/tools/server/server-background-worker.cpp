#include "server-background-worker.h"

server_background_worker::~server_background_worker() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    cv.notify_all();
    if (thread.joinable()) {
        thread.join();
    }
}

void server_background_worker::post(std::function<void()> && job, std::function<void()> && done) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!thread.joinable()) {
            thread = std::thread([this]() { loop(); });
        }
        entries.push({ std::move(job), std::move(done) });
        n_unfinished++;
    }
    cv.notify_all();
}

void server_background_worker::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    cv.wait(lock, [&]() { return n_unfinished == 0; });
}

void server_background_worker::loop() {
    while (true) {
        entry cur;
        {
            std::unique_lock<std::mutex> lock(mutex);
            cv.wait(lock, [&]() { return stopping || !entries.empty(); });
            if (entries.empty()) {
                return;
            }
            cur = std::move(entries.front());
            entries.pop();
        }

        cur.job();
        cur.job = nullptr; // what it holds is freed before it counts as ended

        {
            std::lock_guard<std::mutex> lock(mutex);
            n_unfinished--;
        }
        cv.notify_all();

        if (cur.done) {
            cur.done();
        }
    }
}
