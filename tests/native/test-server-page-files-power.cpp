// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp

// A loss of power at every verb, with everything dropped that is not durable, with all of it kept, and at random.

#include "page-files-testing.h"
#include "page-memory-os.h"

#include <random>

namespace {

const char * const DIR = "memory";

struct power_is_gone {};

// how a loss of power treats what is not durable: 0 drops it, 1 keeps it, others choose by the seed
void lose_power(memory_os & os, int round, unsigned seed) {
    std::mt19937 random(seed * 1000003 + round);
    os.lose_power(
        [&]() { return round == 0 ? false : round == 1 ? true : random() % 2 == 0; },
        [&](size_t n) { return round == 0 ? size_t(0) : random() % (n + 1); });
}

typedef std::function<server_page_files_result(server_page_files &)> action;

// false: the action ended before the verb came
bool run_until(memory_os & os, int at, fault_moment moment, const action & act) {
    faulty_os faulty(os);
    faulty.at     = at;
    faulty.moment = moment;
    faulty.crash  = []() { throw power_is_gone(); };
    try {
        server_page_files files(faulty, DIR);
        const auto res = act(files);
        CHECK(res.ok());
        CHECK(!faulty.was_hit());
        return false;
    } catch (const power_is_gone &) {
        return true;
    }
}

// what is found is one of these, and stays what it is; then everything works
void check_survivor(memory_os & os, const std::set<int> & allowed) {
    server_page_files files(os, DIR);

    const int found = read_generation(files);
    if (allowed.count(found) == 0) {
        std::cerr << "found generation " << found << "\n";
    }
    CHECK(allowed.count(found) == 1);

    std::vector<std::string> done;
    const auto recovered = files.recover(NAME, false, done);
    if (!recovered.ok()) {
        std::cerr << recovered.message << "\n";
    }
    CHECK(recovered.ok());
    CHECK(!has_staging(os, DIR));
    CHECK_EQ(read_generation(files), found);

    for (const int next : { 8, 9 }) {
        CHECK(publish(files, next).ok());
        CHECK_EQ(read_generation(files), next);
    }
    CHECK(!has_staging(os, DIR));
}

// somebody who publishes the same name and is slow: the staging directory stays
struct slow_publisher {
    explicit slow_publisher(memory_os & os) {
        const server_page_os_path staging = { DIR, std::string(NAME) + ".page-staging" };
        bool made = false;
        CHECK(os.make_dir(staging, made).ok());
        CHECK(os.make_dir(staging / "1-1", made).ok() && made);
        CHECK(os.lock(staging / "1-1" / ".lock", SERVER_PAGE_OS_LOCK_EXCLUSIVE, owner).ok());
    }

    server_page_os_handle_ptr owner;
};

const fault_moment MOMENTS[] = { FAULT_BEFORE, FAULT_HALF, FAULT_AFTER };

// `before` is what was published before, in this order; the last of it is what is found
void sweep(const std::vector<int> & before, int after, const action & act, int n_rounds) {
    const int old = before.empty() ? 0 : before.back();

    const auto start = [&](memory_os & os) {
        server_page_files files(os, DIR);
        for (const int generation : before) {
            CHECK(publish(files, generation).ok());
        }
    };

    bool ended = false;
    for (int at = 1; !ended; ++at) {
        for (const auto moment : MOMENTS) {
            for (int round = 0; round < n_rounds; ++round) {
                memory_os os;
                start(os);
                ended = !run_until(os, at, moment, act);
                lose_power(os, round, at * 4 + moment);
                check_survivor(os, ended ? std::set<int> { after } : std::set<int> { old, after });
            }
        }
    }
}

action publishing(int generation) {
    return [=](server_page_files & files) { return publish(files, generation); };
}

// A process dies at every verb, and the power goes at every verb of what takes up its work.
void sweep_second(const action & act, const std::set<int> & outcome, bool beside_another) {
    bool first_ended = false;
    for (int first_at = 1; !first_ended; ++first_at) {
        bool ended = false;
        for (int at = 1; !ended; ++at) {
            for (int round = 0; round < 4; ++round) {
                memory_os os;
                server_page_files files(os, DIR);
                CHECK(publish(files, 2).ok());
                auto other = beside_another ? std::make_unique<slow_publisher>(os) : nullptr;

                first_ended = !run_until(os, first_at, FAULT_BEFORE, publishing(3));
                ended       = !run_until(os, at, FAULT_BEFORE, act);
                other.reset();
                lose_power(os, round, first_at * 100 + at);

                std::set<int> allowed = outcome;
                if (!ended || outcome.empty()) {
                    allowed.insert({ 2, 3 });
                }
                check_survivor(os, allowed);
            }
        }
    }
}

}

TEST(power_is_lost_in_a_first_publication) {
    sweep({}, 2, publishing(2), 40);
}

TEST(power_is_lost_in_a_replacement_with_more_files) {
    sweep({ 1 }, 2, publishing(2), 40);
}

TEST(power_is_lost_in_a_replacement_with_fewer_files) {
    sweep({ 1, 2 }, 3, publishing(3), 40);
}

TEST(power_is_lost_while_a_dead_publication_is_read_or_recovered) {
    sweep_second([](server_page_files & files) { server_page_files_result res; read_generation(files, res); return res; }, {}, false);
    sweep_second([](server_page_files & files) { std::vector<std::string> done; return files.recover(NAME, false, done); }, {}, false);
}

TEST(power_is_lost_while_a_dead_publication_is_replaced) {
    sweep_second(publishing(5), { 5 }, false);
    sweep_second(publishing(5), { 5 }, true);
}

// What a reader was given once does not turn into what was before it.
TEST(a_generation_that_was_read_is_durable) {
    bool ended = false;
    for (int at = 1; !ended; ++at) {
        for (int round = 0; round < 40; ++round) {
            memory_os os;
            server_page_files files(os, DIR);
            CHECK(publish(files, 2).ok());
            ended = !run_until(os, at, FAULT_BEFORE, publishing(3));
            const int found = read_generation(files);
            lose_power(os, round, at);
            check_survivor(os, { found });
        }
    }
}
