// sources: server-page-fsck.cpp server-page-fsck-run.cpp server-page-quarantine.cpp server-page-gc.cpp server-page-check.cpp server-page-codec.cpp server-page-files.cpp server-page-guard.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// What fsck finds and where it goes.

#include "page-fsck-testing.h"

#include "server-page-os-behind.h"

#include <atomic>
#include <thread>

TEST(whole_pages_are_whole_and_stay_as_they_are) {
    page_dir dir;
    save(dir.files, "a");
    save(dir.files, "b b");
    const auto before = everything(dir.path);
    const auto done   = fsck(dir);
    CHECK_EQ(done.said, std::string("whole a; whole b b; "));
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_OK);
    CHECK_EQ(done.findings[0].n_bytes, fs::file_size(dir / "a") + fs::file_size(dir / "a.ckpt") + fs::file_size(dir / "a.dft"));
    CHECK_EQ(everything(dir.path), before);
}

TEST(what_is_damaged_is_put_aside_and_all_else_is_left) {
    page_dir dir;
    fill(dir);
    const auto bad    = read_text(dir / "bad");
    const auto ckpt   = read_text(dir / "bad.ckpt");
    const auto before = everything(dir.path);

    const auto dry = fsck(dir, true);
    CHECK_EQ(dry.said, std::string("damaged bad > .quarantine; orphan gone.ckpt > .quarantine; orphan gone.dft > .quarantine; ") + FILLED);
    CHECK_EQ(dry.status, SERVER_PAGE_FSCK_DAMAGED);
    CHECK_EQ(everything(dir.path), before);

    const auto done = fsck(dir);
    CHECK_EQ(done.said, std::string("damaged bad > bad-1 done; orphan gone.ckpt > gone-1 done; orphan gone.dft > gone-1 done; ") + FILLED);
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_DAMAGED);
    CHECK(contains(done.whys, "'bad' is damaged: it is not what was written with 'bad.ckpt'"));
    CHECK_EQ(read_text(dir / ".quarantine/bad-1/bad"), bad);
    CHECK_EQ(read_text(dir / ".quarantine/bad-1/bad.ckpt"), ckpt);
    CHECK(fs::exists(dir / ".quarantine/bad-1/bad.dft"));
    CHECK(!fs::exists(dir / "bad") && !fs::exists(dir / "bad.ckpt") && !fs::exists(dir / "bad.dft"));
    CHECK_EQ(read_text(dir / ".quarantine/bad-1/.why.txt"),
            std::string("quarantined 1790000000 (2026-09-21 14:13:20 UTC)\n'bad' is damaged: it is not what was written with 'bad.ckpt'\n"
                "The files beside this note are as they were found. To use one again, move it back to the directory of the pages.\n"));
    CHECK_EQ(mode_of(dir / ".quarantine"), 0700u);
    CHECK_EQ(mode_of(dir / ".quarantine/bad-1"), 0700u);
    CHECK_EQ(mode_of(dir / ".quarantine/bad-1/.why.txt"), 0600u);

    const auto again = fsck(dir);
    CHECK_EQ(again.said, std::string(FILLED));
    CHECK_EQ(again.status, SERVER_PAGE_FSCK_DAMAGED); // a part is lost

    // the name is free, and takes another number the next time
    save(dir.files, "bad");
    flip_last(dir / "bad");
    CHECK(contains(fsck(dir).said, "damaged bad > bad-2 done"));
    CHECK_EQ(read_text(dir / ".quarantine/bad-1/bad"), bad);
}

TEST(another_programs_file_stays_where_it_is) {
    page_dir dir;
    save(dir.files, "a");
    flip_last(dir / "a");
    write_text(dir / "a.lora", "another program's");
    CHECK_EQ(fsck(dir).said, std::string("damaged a > a-1 done; "));
    CHECK_EQ(read_text(dir / "a.lora"), std::string("another program's"));
    CHECK(!fs::exists(dir / ".quarantine/a-1/a.lora"));
}

TEST(a_page_that_is_replaced_after_it_was_judged_is_not_put_aside) {
    page_dir dir;
    save(dir.files, "a");
    flip_last(dir / "a");

    // between the two looks
    faulty_os os(dir.os);
    int n_locks = 0;
    os.before = [&](const std::string & verb) {
        if (verb == "lock" && ++n_locks == 3) { // the list, the first look, the second
            save(dir.files, "a", "another state");
        }
    };
    const auto done = run(server_page_fsck, os, dir.path);
    CHECK_EQ(n_locks, 3);
    CHECK_EQ(done.said, std::string("whole a; "));
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_OK);
    CHECK_EQ(read_text(dir / "a"), state_of("another state"));
    CHECK(!fs::exists(dir / ".quarantine"));
}

TEST(who_publishes_meanwhile_is_in_nobodys_way) {
    page_dir dir;
    save(dir.files, "a", "state 0");

    std::atomic<bool> ended { false };
    std::thread publisher([&]() {
        faulty_os os(dir.os, true); // without syncs
        server_page_files files(os, dir.path);
        for (int i = 1; i <= 200; ++i) {
            save(files, "a", "state " + std::to_string(i));
            save(files, "b", "state " + std::to_string(i));
        }
        ended = true;
    });
    while (!ended) {
        for (const verb_t verb : { server_page_fsck, server_page_gc }) {
            const auto done = run(verb, dir.os, dir.path);
            CHECK_EQ(done.status, SERVER_PAGE_FSCK_OK);
            for (const auto & finding : done.findings) {
                CHECK(finding.what == SERVER_PAGE_FOUND_WHOLE || finding.what == SERVER_PAGE_FOUND_WAITING);
            }
        }
    }
    publisher.join();
    CHECK_EQ(fsck(dir).said, std::string("whole a; whole b; "));
    CHECK_EQ(read_text(dir / "a"), state_of("state 200"));
    CHECK(!fs::exists(dir / ".quarantine"));
}

TEST(a_directory_or_file_that_cannot_be_read_is_told) {
    const auto none = run(server_page_fsck, server_page_os_native(), "/nowhere/at all");
    CHECK_EQ(none.said, std::string("failed ; "));
    CHECK_EQ(none.status, SERVER_PAGE_FSCK_FAILED);
    CHECK_EQ(none.whys, std::string("/nowhere/at all: there is no such directory\n"));
    CHECK_EQ(run(server_page_gc, server_page_os_native(), "/nowhere/at all").whys, none.whys);

    page_dir dir;
    save(dir.files, "a");
    save(dir.files, "b");
    faulty_os os(dir.os);
    os.only = "read";
    os.at   = 1;
    const auto done = run(server_page_fsck, os, dir.path);
    CHECK_EQ(done.said, std::string("failed a; whole b; "));
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_FAILED);
    CHECK(fs::exists(dir / "a")); // what cannot be read is not known to be damaged
}

TEST(a_link_is_not_followed_and_its_sidecars_are_no_orphans) {
    page_dir dir;
    save(dir.files, "a");
    fs::rename(dir / "a", dir / "elsewhere");
    fs::create_symlink("elsewhere", dir / "a");
    CHECK(contains(fsck(dir).said, "failed a; "));
    CHECK(fs::exists(dir / "a.ckpt") && fs::exists(dir / "a.dft"));
}

// An interrupted quarantine leaves them: nothing is deleted that has not been aside for its days.
TEST(orphans_of_ours_are_put_aside_and_nothing_is_deleted) {
    page_dir dir;
    save(dir.files, "gone");
    fs::remove(dir / "gone");
    write_text(dir / "gone.lora", "another program's");
    write_text(dir / "short.ckpt", "\x89llp"); // could be anybody's
    const auto before = everything(dir.path);
    const auto ckpt   = read_text(dir / "gone.ckpt");
    const auto dft    = read_text(dir / "gone.dft");

    for (const bool dry_run : { true, false }) {
        CHECK_EQ(run(server_page_gc, dir.os, dir.path, dry_run, NOON, 0).said, std::string());
        CHECK_EQ(everything(dir.path), before);
    }

    const auto dry = fsck(dir, true);
    CHECK_EQ(dry.said, std::string("orphan gone.ckpt > .quarantine; unknown gone.lora; orphan gone.dft > .quarantine; unknown short.ckpt; "));
    CHECK_EQ(dry.status, SERVER_PAGE_FSCK_DAMAGED);
    CHECK_EQ(everything(dir.path), before);

    const auto done = fsck(dir);
    CHECK_EQ(done.said, std::string("orphan gone.ckpt > gone-1 done; unknown gone.lora; orphan gone.dft > gone-1 done; unknown short.ckpt; "));
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_DAMAGED);
    CHECK_EQ(done.findings[0].n_bytes, ckpt.size());
    CHECK_EQ(read_text(dir / ".quarantine/gone-1/gone.ckpt"), ckpt);
    CHECK_EQ(read_text(dir / ".quarantine/gone-1/gone.dft"), dft);
    CHECK_EQ(read_text(dir / ".quarantine/gone-1/.why.txt"),
            std::string("quarantined 1790000000 (2026-09-21 14:13:20 UTC)\n'gone.ckpt': there is no 'gone' that it belongs to\n'gone.dft': there is no 'gone' that it belongs to\n"
                "The files beside this note are as they were found. To use one again, move it back to the directory of the pages.\n"));
    CHECK(fs::exists(dir / "gone.lora") && fs::exists(dir / "short.ckpt"));

    CHECK_EQ(fsck(dir).status, SERVER_PAGE_FSCK_OK);
    CHECK_EQ(run(server_page_gc, dir.os, dir.path, false, NOON + 30*DAY_S - 1).said, std::string("quarantined .quarantine/gone-1; "));
    CHECK_EQ(run(server_page_gc, dir.os, dir.path, false, NOON + 30*DAY_S).said, std::string("quarantined .quarantine/gone-1 remove done; "));
}

TEST(the_sidecars_of_a_page_that_came_meanwhile_stay) {
    page_dir dir;
    save(dir.files, "a");
    fs::remove(dir / "a");

    faulty_os os(dir.os);
    int n_locks = 0;
    os.before = [&](const std::string & verb) {
        if (verb == "lock" && ++n_locks == 3) { // the list, the first look, the second
            save(dir.files, "a");
        }
    };
    CHECK_EQ(run(server_page_fsck, os, dir.path).said, std::string("whole a; "));
    CHECK_EQ(fsck(dir).said, std::string("whole a; "));
}

namespace {

struct counting_os final : server_page_os_behind {
    using server_page_os_behind::server_page_os_behind;

    size_t n_read = 0;

    result read(const path & p, server_page_os_handle & file, void * data, size_t size) override {
        n_read += size;
        return os.read(p, file, data, size);
    }
};

}

TEST(another_programs_files_are_not_read_on) {
    page_dir dir;
    const std::string large(20*SERVER_PAGE_HEADER_SIZE_MAX, 'x');
    write_text(dir / "film", large);
    write_text(dir / "film.lora", large);
    write_text(dir / "notes.dft", large);
    counting_os os(dir.os);
    CHECK_EQ(run(server_page_fsck, os, dir.path).said, std::string("unknown film; unknown notes.dft; "));
    CHECK(os.n_read <= 4*SERVER_PAGE_HEADER_SIZE_MAX);

    // nor beside one of ours
    save(dir.files, "page", "the state " + std::string(100*1000, 'y'));
    write_text(dir / "page.lora", large);
    os.n_read = 0;
    const auto done = run(server_page_fsck, os, dir.path);
    CHECK_EQ(done.said, std::string("unknown film; unknown notes.dft; whole page; "));
    CHECK_EQ(done.findings[0].n_bytes, 2*large.size());
    CHECK(os.n_read < 6*SERVER_PAGE_HEADER_SIZE_MAX);

    // what is beside sidecars of ours is read whole: it is FILE, damaged
    write_text(dir / "page", large);
    CHECK_EQ(fsck(dir).said, std::string("unknown film; unknown notes.dft; damaged page > page-1 done; "));
    CHECK_EQ(read_text(dir / "page.lora"), large);
}

TEST(who_waits_for_a_lock_says_so_once_and_at_once) {
    for (const verb_t verb : { server_page_fsck, server_page_gc }) {
        page_dir dir;
        save(dir.files, "a");
        leave_stage(dir, "1-1");

        server_page_os_handle_ptr held;
        const server_page_os_path lock = { dir.path, ".page-lock" };
        CHECK(dir.os.lock(lock, SERVER_PAGE_OS_LOCK_EXCLUSIVE, held).ok());

        server_page_fsck_options options;
        options.magic   = MAGIC;
        options.version = VERSION;
        std::string told;
        const auto status = verb(dir.os, dir.path, options, [&](const server_page_finding & finding) {
            told += said(finding);
            if (finding.what == SERVER_PAGE_FOUND_WAITING) {
                CHECK_EQ(finding.why, "another process holds " + lock.str() + ", waiting");
                held.reset(); // else this would wait for ever
            }
        });
        CHECK_EQ(status, SERVER_PAGE_FSCK_OK);
        CHECK_EQ(told, std::string("waiting ; ") + (verb == server_page_fsck ? "whole a; " : "") + "recovered page done; ");
    }
}
