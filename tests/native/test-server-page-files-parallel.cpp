// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-*.cpp page-files-place-*.cpp

// Many at once: what a reader finds is always one whole generation, and nobody is in another one's way.

#include "page-files-place.h"
#include "page-files-testing.h"

#include <thread>

namespace {

const int N_PUBLISHED = 40; // by each
const int N_READ      = 150;

void publish_many(const std::string & dir, int first) {
    server_page_files files(server_page_os_native(), dir);
    for (int i = 0; i < N_PUBLISHED; ++i) {
        const auto res = publish(files, first + i);
        if (!res.ok() || !res.message.empty()) {
            std::cerr << res.message << "\n";
        }
        CHECK(res.ok());
        CHECK(res.message.empty());
    }
}

void read_many(const std::string & dir) {
    server_page_files files(server_page_os_native(), dir);
    for (int i = 0; i < N_READ; ++i) {
        CHECK(read_generation(files) > 0);
    }
}

void check_end(const std::string & dir) {
    server_page_files files(server_page_os_native(), dir);
    const int found = read_generation(files);
    CHECK(found == 1000 + N_PUBLISHED - 1 || found == 2001 + N_PUBLISHED - 1);
    CHECK(!has_staging(server_page_os_native(), dir));
}

const std::vector<std::function<void(const std::string & dir)>> WORK = {
    [](const std::string & dir) { publish_many(dir, 1000); },
    [](const std::string & dir) { publish_many(dir, 2001); },
    read_many, read_many, read_many,
};

// to be killed
void tell_and_wait() {
    std::puts("here");
    std::fflush(stdout);
    std::getchar();
}

void start(const std::string & dir) {
    server_page_files files(server_page_os_native(), dir);
    CHECK(publish(files, 2).ok());
}

}

TEST(threads_publish_and_read_one_name) {
    const temporary_dir dir;
    start(dir.path);

    std::vector<std::thread> threads;
    for (const auto & work : WORK) {
        threads.emplace_back([&]() { work(dir.path); });
    }
    for (auto & thread : threads) {
        thread.join();
    }
    check_end(dir.path);
}

TEST(processes_publish_and_read_one_name) {
    if (const auto words = child_words(); !words.empty()) {
        WORK.at(std::stoul(words.at(0)))(words.at(1));
        return;
    }
    const temporary_dir dir;
    start(dir.path);

    std::vector<std::unique_ptr<child_process>> children;
    for (size_t i = 0; i < WORK.size(); ++i) {
        children.push_back(start_child("processes_publish_and_read_one_name", { std::to_string(i), dir.path }));
    }
    for (const auto & child : children) {
        CHECK_EQ(child->wait(), 0);
    }
    check_end(dir.path);
}

// Whether somebody else could take the lock of the directory at the first of this verb.
static bool is_free_at(const std::string & verb, const std::function<server_page_files_result(server_page_files & files)> & act) {
    const temporary_dir dir;
    start(dir.path);

    auto & os = server_page_os_native();
    faulty_os watched(os);
    int  n_seen = 0;
    bool res    = false;
    watched.before = [&](const std::string & cur) {
        if (cur == verb && n_seen++ == 0) {
            server_page_os_handle_ptr held;
            res = os.lock({ dir.path, ".page-lock" }, SERVER_PAGE_OS_LOCK_TRY, held).ok();
        }
    };
    server_page_files files(watched, dir.path);
    CHECK(act(files).ok());
    CHECK(n_seen > 0);

    return res;
}

TEST(the_lock_is_held_where_generations_change_and_not_while_files_are_written) {
    const auto publishing = [](server_page_files & files) { return publish(files, 3); };
    const auto reading    = [](server_page_files & files) { server_page_files_result res; read_generation(files, res); return res; };

    CHECK(is_free_at("write", publishing));
    CHECK(is_free_at("sync", publishing));
    CHECK(!is_free_at("make_dir", publishing));
    CHECK(!is_free_at("rename", publishing));
    CHECK(!is_free_at("remove", publishing));
    CHECK(!is_free_at("open", reading));
    CHECK(!is_free_at("read", reading));
}

TEST(a_lock_is_between_processes) {
    const auto words = child_words();
    const temporary_dir own;
    auto & os = server_page_os_native();

    const server_page_os_path lock = { words.empty() ? own.path : words.at(1), ".page-lock" };
    server_page_os_handle_ptr held;
    if (!words.empty()) {
        CHECK(os.lock(lock, words.at(0) == "shared" ? SERVER_PAGE_OS_LOCK_SHARED : SERVER_PAGE_OS_LOCK_EXCLUSIVE, held).ok());
        tell_and_wait();
        return;
    }

    for (const auto how : { SERVER_PAGE_OS_LOCK_TRY, SERVER_PAGE_OS_LOCK_TRY_SHARED }) {
        CHECK_EQ(os.lock(lock, how, held).status, SERVER_PAGE_OS_NOT_FOUND); // who only tries makes nothing
    }
    for (const std::string how : { "shared", "exclusive" }) {
        const auto child = start_child("a_lock_is_between_processes", { how, own.path });
        child->wait_for_line();
        CHECK_EQ(os.lock(lock, SERVER_PAGE_OS_LOCK_TRY, held).status, SERVER_PAGE_OS_BUSY);
        CHECK(!held);
        CHECK_EQ(os.lock(lock, SERVER_PAGE_OS_LOCK_TRY_SHARED, held).status, how == "shared" ? SERVER_PAGE_OS_OK : SERVER_PAGE_OS_BUSY);
        CHECK_EQ(held != nullptr, how == "shared");
        held.reset();
        if (how == "shared") {
            CHECK(os.lock(lock, SERVER_PAGE_OS_LOCK_SHARED, held).ok());
            held.reset();
        }
        child->kill();
        CHECK(os.lock(lock, SERVER_PAGE_OS_LOCK_TRY, held).ok());
        held.reset();
    }
}

namespace {

struct death {
    std::string verb; // of a publication of generation 3, a child is killed before it
    int         n;    // which one of these

    int         found;
};

// while it stages; before the record counts; half-way through the moves; with what is retired still there; without its record
const death DEATHS[] = { { "write", 1, 2 }, { "write", 2, 2 }, { "rename", 1, 2 }, { "rename", 3, 3 }, { "remove", 1, 3 }, { "remove", 3, 3 } };

void publish_until(const death & end, const std::string & dir) {
    int n_seen = 0;
    faulty_os waiting(server_page_os_native());
    waiting.before = [&](const std::string & verb) {
        if (verb == end.verb && ++n_seen == end.n) {
            tell_and_wait();
        }
    };
    server_page_files files(waiting, dir);
    publish(files, 3);
}

}

// The system drops the locks of a process that is killed; the name is free for the next one, who takes up what was left.
TEST(a_killed_process_holds_nobody_up) {
    if (const auto words = child_words(); !words.empty()) {
        publish_until(DEATHS[std::stoul(words.at(0))], words.at(1));
        CHECK(false); // it ended without that verb
    }

    for (const auto & end : DEATHS) {
        const temporary_dir dir;
        start(dir.path);

        const auto child = start_child("a_killed_process_holds_nobody_up", { std::to_string(&end - DEATHS), dir.path });
        child->wait_for_line();

        server_page_files files(server_page_os_native(), dir.path);
        std::vector<std::string> done;
        if (end.verb == "write" && end.n == 1) { // it does not hold the lock of the directory
            CHECK(files.recover(NAME, false, done).ok());
            CHECK(done.empty()); // it lives
            CHECK(has_staging(server_page_os_native(), dir.path));
        }
        child->kill();

        CHECK(files.recover(NAME, false, done).ok());
        CHECK(!done.empty());
        CHECK_EQ(read_generation(files), end.found);
        CHECK(!has_staging(server_page_os_native(), dir.path));
    }
}
