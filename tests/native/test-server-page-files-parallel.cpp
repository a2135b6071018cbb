// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// Many at once: what a reader finds is always one whole generation, and nobody is in another one's way.

#include "page-files-testing.h"

#include <csignal>
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
    const temporary_dir dir;
    start(dir.path);

    std::vector<pid_t> children;
    for (const auto & work : WORK) {
        children.push_back(fork());
        CHECK(children.back() >= 0);
        if (children.back() == 0) {
            work(dir.path);
            _exit(0);
        }
    }
    for (const pid_t child : children) {
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
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
    const auto removing   = [](server_page_files & files) { return files.remove(NAME); };
    const auto reading    = [](server_page_files & files) { server_page_files_result res; read_generation(files, res); return res; };

    CHECK(is_free_at("write", publishing));
    CHECK(is_free_at("sync", publishing));
    CHECK(!is_free_at("make_dir", publishing));
    CHECK(!is_free_at("rename", publishing));
    CHECK(!is_free_at("remove", publishing));
    CHECK(!is_free_at("remove", removing));
    CHECK(!is_free_at("open", reading));
    CHECK(!is_free_at("read", reading));
}

// The kernel drops the locks of a process that is killed; the name is free for the next one, who takes up what was left.
TEST(a_killed_process_holds_nobody_up) {
    const temporary_dir dir;
    start(dir.path);

    for (const std::string last : { "write", "rename" }) { // while it stages, while it holds the lock of the directory
        int there[2];
        CHECK(pipe(there) == 0);
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            faulty_os waiting(server_page_os_native());
            waiting.before = [&](const std::string & verb) {
                if (verb == last) {
                    CHECK(write(there[1], "x", 1) == 1);
                    pause();
                }
            };
            server_page_files files(waiting, dir.path);
            publish(files, 3);
            _exit(1);
        }
        char byte = 0;
        CHECK(read(there[0], &byte, 1) == 1);

        server_page_files files(server_page_os_native(), dir.path);
        if (last == "write") {
            std::vector<std::string> done;
            CHECK(files.recover(false, done).ok());
            CHECK(done.empty()); // it lives
            CHECK(has_staging(server_page_os_native(), dir.path));
        }
        CHECK(kill(child, SIGKILL) == 0);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status));

        std::vector<std::string> done;
        CHECK(files.recover(false, done).ok());
        CHECK_EQ(done.size(), 1u);
        CHECK_EQ(read_generation(files), 2);
        CHECK(!has_staging(server_page_os_native(), dir.path));
        close(there[0]);
        close(there[1]);
    }
}
