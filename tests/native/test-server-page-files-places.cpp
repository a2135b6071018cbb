// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// What stands in the way of files in a directory, and what a directory or a disk does not allow.

#include "page-files-fork.h"
#include "page-files-testing.h"

#include <csignal>
#include <set>

#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

namespace {

namespace fs = std::filesystem;

unsigned mode_of(const std::string & path) {
    struct stat st;
    CHECK(lstat(path.c_str(), &st) == 0);
    return st.st_mode & 07777;
}

}

TEST(files_are_for_their_owner_whatever_the_umask) {
    for (const unsigned mask : { 0u, 022u, 0777u }) {
        page_dir dir;
        faulty_os looking(dir.os);
        std::set<unsigned> dir_modes;
        looking.before = [&](const std::string &) {
            for (const auto & entry : fs::recursive_directory_iterator(dir.path)) {
                if (entry.is_directory()) {
                    dir_modes.insert(mode_of(entry.path().string()));
                }
            }
        };

        const auto before = umask(mask);
        server_page_files files(looking, dir.path);
        CHECK(publish(files, 2).ok());
        umask(before);
        CHECK_EQ(mode_of(dir / "page"), 0600u);
        CHECK_EQ(mode_of(dir / "page.ckpt"), 0600u);
        CHECK_EQ(mode_of(dir / ".page-lock"), 0600u);
        CHECK(dir_modes == std::set<unsigned> { 0700u });
    }
}

TEST(what_is_no_file_in_the_place_of_one_is_an_error_and_stays) {
    const std::string place[] = { "page", "page.ckpt", "page.lora" };
    for (const auto & name : place) {
        for (const bool is_link : { false, true }) {
            page_dir dir(2);
            const temporary_dir elsewhere;
            write_text(elsewhere / "victim", "untouched");
            fs::remove(dir / name);
            if (is_link) {
                fs::create_symlink(elsewhere / "victim", dir / name);
            } else {
                fs::create_directory(dir / name);
            }

            server_page_files_result read;
            CHECK_EQ(read_generation(dir.files, read), -1);
            for (const auto & res : { read, publish(dir.files, 4), publish(dir.files, 3) }) {
                CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
                CHECK(contains(res.message, dir / name));
            }
            CHECK_EQ(fs::is_symlink(dir / name), is_link);

            faulty_os watched(dir.os); // nothing large is written in vain
            watched.before = [](const std::string & verb) { CHECK(verb != "write"); };
            server_page_files files(watched, dir.path);
            CHECK_EQ(publish(files, 3).status, SERVER_PAGE_FILES_IO);
            CHECK_EQ(read_text(elsewhere / "victim"), std::string("untouched"));
            CHECK(!has_staging(dir.os, dir.path));
        }
    }
}

TEST(a_pipe_in_the_place_of_a_file_holds_nobody_up) {
    page_dir dir(2);
    fs::remove(dir / "page");
    CHECK(mkfifo((dir / "page").c_str(), 0600) == 0);
    CHECK_EQ(read_generation(dir.files), -1);
}

TEST(no_symlink_is_followed_in_the_staging) {
    const temporary_dir elsewhere;
    fs::create_directories(elsewhere / "1-1");
    write_text(elsewhere / "1-1/page", "untouched");

    for (const bool is_link : { true, false }) {
        page_dir dir(2);
        if (is_link) {
            fs::create_directory_symlink(elsewhere.path, dir / "page.page-staging");
        } else {
            write_text(dir / "page.page-staging", "a file");
        }
        server_page_files_result read;
        CHECK_EQ(read_generation(dir.files, read), -1);
        std::vector<std::string> done;
        for (const auto & res : { read, publish(dir.files, 3), dir.files.recover(NAME, false, done) }) {
            CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
            CHECK(contains(res.message, dir / "page.page-staging"));
            CHECK(contains(res.message, is_link ? "symbolic link" : "Not a directory"));
        }
        CHECK_EQ(read_text(dir / "page"), contents_of(2, ""));
    }

    // in place of the record, of a stage, of the lock
    for (const std::string name : { "page.page-staging/commit", "page.page-staging/1-1", ".page-lock" }) {
        page_dir dir(2);
        fs::remove(dir / name);
        fs::create_directories(dir / "page.page-staging");
        fs::create_symlink(elsewhere / (contains(name, "1-1") ? "1-1" : "1-1/page"), dir / name);
        std::vector<std::string> done;
        const auto res = dir.files.recover(NAME, false, done);
        CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
        CHECK(contains(res.message, dir / name));
    }
    CHECK_EQ(read_text(elsewhere / "1-1/page"), std::string("untouched"));
}

TEST(a_stage_is_left_where_its_owner_cannot_be_told) {
    page_dir dir(2);
    const auto stage = leave_stage(dir, "1-1");
    fs::remove(stage + "/.lock");
    fs::create_symlink("page", stage + "/.lock");
    const auto alien = dir / "page.page-staging/notes";
    write_text(alien, "of a person");

    std::vector<std::string> done;
    const auto res = dir.files.recover(NAME, false, done);
    CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
    CHECK(done.empty());
    CHECK(fs::exists(stage + "/page") && fs::exists(alien));

    const auto published = publish(dir.files, 3); // warns, and works
    CHECK(published.ok());
    CHECK(contains(published.message, dir / "page.page-staging"));
    CHECK_EQ(read_generation(dir.files), 3);
}

TEST(a_directory_that_is_none_is_an_error) {
    page_dir dir;
    write_text(dir / "file", "");
    fs::create_symlink("loop", dir / "loop");
    const auto in = [&](const std::string & name) { return server_page_files(dir.os, dir / name); };

    for (const std::string name : { "file", "loop", "missing" }) {
        const auto expected = name == "missing" ? SERVER_PAGE_FILES_NOT_FOUND : SERVER_PAGE_FILES_IO;
        auto files = in(name);
        server_page_files_result read;
        read_generation(files, read);
        std::vector<server_page_generation> generations;
        std::vector<std::string> done;
        for (const auto & res : { read, publish(files, 1), files.list(generations), files.recover(NAME, false, done) }) {
            CHECK_EQ(res.status, expected);
            CHECK(contains(res.message, dir / name));
        }
    }

    // the directory is the operator's, who may have put a link there
    fs::create_directory(dir / "real");
    fs::create_directory_symlink("real", dir / "link");
    auto files = in("link");
    CHECK(publish(files, 2).ok());
    CHECK(fs::exists(dir / "real/page.dft"));
}

TEST(a_directory_that_may_not_be_written_is_read_unless_something_is_unfinished) {
    for (const bool has_lock : { true, false }) {
        for (const bool pending : { false, true }) {
            page_dir dir(2);
            if (pending) {
                leave_pending(dir.os, dir.path, 3, 1);
            }
            if (!has_lock) {
                fs::remove(dir / ".page-lock");
            }
            for (const auto & entry : fs::recursive_directory_iterator(dir.path)) {
                CHECK(chmod(entry.path().c_str(), entry.is_directory() ? 0555 : 0444) == 0);
            }
            CHECK(chmod(dir.path.c_str(), 0555) == 0);

            CHECK_EQ(in_child([&]() {
                give_up_rights();
                server_page_files_result res;
                const int found = read_generation(dir.files, res);
                CHECK_EQ(res.status, pending ? SERVER_PAGE_FILES_NO_ACCESS : SERVER_PAGE_FILES_OK);
                CHECK_EQ(found, pending ? -1 : 2);
                CHECK_EQ(publish(dir.files, 4).status, SERVER_PAGE_FILES_NO_ACCESS);
                std::vector<server_page_generation> generations;
                CHECK(dir.files.list(generations).ok());
                CHECK_EQ(generations.size(), 1u);
            }), 0);
            CHECK(chmod(dir.path.c_str(), 0700) == 0);
            for (const auto & entry : fs::recursive_directory_iterator(dir.path)) {
                CHECK(chmod(entry.path().c_str(), 0700) == 0);
            }
        }
    }
}

// The signal ends a process that does not know better.
TEST(the_limit_for_the_size_of_a_file_is_no_space_and_no_signal) {
    page_dir dir(2);
    CHECK_EQ(in_child([&]() {
        struct rlimit limit = { 30, 30 };
        CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
        CHECK(signal(SIGXFSZ, SIG_DFL) != SIG_ERR);
        const auto res = publish(dir.files, 3);
        CHECK_EQ(res.status, SERVER_PAGE_FILES_NO_SPACE);
        CHECK(contains(res.message, "write " + dir.path));

        sigset_t signals;
        sigpending(&signals);
        CHECK(sigismember(&signals, SIGXFSZ) == 0);
        pthread_sigmask(SIG_BLOCK, nullptr, &signals);
        CHECK(sigismember(&signals, SIGXFSZ) == 0);
    }), 0);
    CHECK_EQ(read_generation(dir.files), 2);
    CHECK(!has_staging(dir.os, dir.path));
}

TEST(a_disk_with_room_for_half_a_page_keeps_the_old_one) {
    const temporary_dir dir;
    CHECK_EQ(in_child([&]() {
        // of this child alone, and gone with it
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
                mount("tmpfs", dir.path.c_str(), "tmpfs", 0, "size=1m") != 0) {
            std::cerr << "no file system may be mounted here: what fails half-way is tested with injected faults alone\n";
            return;
        }
        server_page_files files(server_page_os_native(), dir.path);
        CHECK(publish(files, 2).ok());
        const std::string large(1500 * 1000, 'x');
        const auto res = files.publish(NAME, { { "", { { large.data(), large.size() } } } });
        CHECK_EQ(res.status, SERVER_PAGE_FILES_NO_SPACE);
        CHECK_EQ(read_generation(files), 2);
        CHECK(!has_staging(server_page_os_native(), dir.path));
    }), 0);
}
