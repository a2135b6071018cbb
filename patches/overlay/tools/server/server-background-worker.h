#pragma once

// One thread for jobs beside decoding. A thread for each job would leave an allocator arena behind each time.

#include <condition_variable>
#include <functional>
#include <mutex>
#include <queue>
#include <thread>

struct server_background_worker {
    // jobs that are left are still done
    ~server_background_worker();

    // jobs are done in order; `done` is called on the same thread when the job has ended
    // a job must not throw
    void post(std::function<void()> && job, std::function<void()> && done = nullptr);

    // until every job posted before has ended; does not wait for `done`, which may need a lock that the caller holds
    void wait();

private:
    struct entry {
        std::function<void()> job;
        std::function<void()> done;
    };

    void loop();

    std::mutex              mutex;
    std::condition_variable cv;
    std::queue<entry>       entries;

    int  n_unfinished = 0;
    bool stopping     = false;

    std::thread thread; // started by the first job
};
