// sources: server-page-fsck.cpp server-page-fsck-run.cpp server-page-quarantine.cpp server-page-gc.cpp server-page-check.cpp server-page-codec.cpp server-page-files.cpp server-page-guard.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// What is put aside, what stops that, and what becomes of it.

#include "page-fsck-testing.h"
#include "page-memory-os.h"

#include <random>

TEST(an_interrupted_quarantine_leaves_nothing_that_looks_like_a_page) {
    for (const fault_moment moment : { FAULT_BEFORE, FAULT_AFTER }) {
        for (int at = 1; ; ++at) {
            page_dir dir;
            save(dir.files, "a");
            flip_last(dir / "a");
            std::map<std::string, std::string> damaged;
            for (const std::string suffix : { "", ".ckpt", ".dft" }) {
                damaged[suffix] = read_text(dir / ("a" + suffix));
            }

            faulty_os os(dir.os);
            os.at           = at;
            os.moment       = moment;
            os.from_then_on = true;
            const auto done = run(server_page_fsck, os, dir.path);
            if (!os.was_hit()) {
                CHECK_EQ(done.said, std::string("damaged a > a-1 done; "));
                break;
            }
            CHECK(done.status == SERVER_PAGE_FSCK_FAILED || contains(done.said, " done"));

            // it has its sidecars, or is not there
            CHECK(!fs::exists(dir / "a") || (fs::exists(dir / "a.ckpt") && fs::exists(dir / "a.dft")));

            // and whatever is left of it is finished by the next, with not a byte lost
            CHECK(fsck(dir).status != SERVER_PAGE_FSCK_FAILED);
            CHECK(!fs::exists(dir / "a") && !fs::exists(dir / "a.ckpt") && !fs::exists(dir / "a.dft"));
            CHECK_EQ(fsck(dir).status, SERVER_PAGE_FSCK_OK);
            for (const auto & [suffix, text] : damaged) {
                CHECK(contains(everything(dir / ".quarantine"), "/a" + suffix + "=" + text));
            }
        }
    }
}

TEST(a_loss_of_power_leaves_nothing_that_looks_like_a_page) {
    struct power_is_gone {};

    for (unsigned seed = 0; seed < 30; ++seed) {
        for (int at = 1, was_hit = true; was_hit; ++at) {
            memory_os os;
            server_page_files files(os, "memory");
            save(files, "a", "the state", true);

            faulty_os faulty(os);
            faulty.at    = at;
            faulty.crash = []() { throw power_is_gone(); };
            try {
                run(server_page_fsck, faulty, "memory");
            } catch (const power_is_gone &) {
            }
            was_hit = faulty.was_hit();

            std::mt19937 random(seed*1000 + at);
            os.lose_power([&]() { return random() % 2 == 0; }, [&](size_t n) { return random() % (n + 1); });

            // as it was, or its own file is gone
            std::vector<server_page_generation> found;
            CHECK(files.list(found).ok());
            for (const auto & generation : found) {
                CHECK(generation.files[0].suffix != "" || generation.files.size() == 3);
            }
            run(server_page_fsck, os, "memory");
            CHECK_EQ(run(server_page_fsck, os, "memory").status, SERVER_PAGE_FSCK_OK);

            // with not a byte lost
            std::vector<server_page_os_entry> places;
            CHECK(os.list({ "memory", ".quarantine" }, places).ok());
            bool is_kept = false;
            for (const auto & place : places) {
                server_page_os_entry entry;
                is_kept = is_kept || (os.look({ "memory", ".quarantine/" + place.name + "/a" }, entry).ok() && entry.n_bytes == state_of("the state").size());
            }
            CHECK(is_kept);
        }
    }
}

TEST(a_full_disk_moves_nothing_and_that_is_told_once) {
    page_dir dir;
    save(dir.files, "a");
    flip_last(dir / "a");
    faulty_os os(dir.os);
    os.only   = "write";
    os.at     = 1;
    os.moment = FAULT_HALF;
    os.status = SERVER_PAGE_OS_NO_SPACE;
    const auto done = run(server_page_fsck, os, dir.path);
    CHECK_EQ(done.said, std::string("failed a; "));
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_FAILED);
    CHECK(contains(done.whys, "'a' is damaged: it is not what was written with 'a.ckpt'; it could not be put aside: write "));
    CHECK(fs::exists(dir / "a") && fs::exists(dir / "a.ckpt"));
    CHECK_EQ(everything(dir / ".quarantine"), std::string());
}

// Of a quarantine that was begun it is told where the rest is; of one that moved nothing there is nothing left.
TEST(a_quarantine_that_fails_half_way_says_where) {
    for (int at = 1; at <= 3; ++at) {
        page_dir dir;
        save(dir.files, "a");
        flip_last(dir / "a");
        faulty_os os(dir.os);
        os.only = "rename";
        os.at   = at;
        const auto done = run(server_page_fsck, os, dir.path);
        CHECK_EQ(done.said, std::string("failed a; "));
        CHECK_EQ(contains(done.whys, "a part of it may be in " + (dir / ".quarantine/a-1")), at > 1);
        CHECK_EQ(fs::exists(dir / ".quarantine/a-1/.why.txt"), at > 1);
        CHECK_EQ(fs::exists(dir / ".quarantine/a-1"), at > 1);
    }
}

TEST(what_stands_in_the_way_of_the_quarantine_is_left_alone) {
    const auto make = [](page_dir & dir) {
        save(dir.files, "a");
        flip_last(dir / "a");
    };
    {
        page_dir dir;
        make(dir);
        fs::create_directory(dir / ".quarantine");
        write_text(dir / ".quarantine/a-1", "a file");
        fs::create_symlink("a-1", dir / ".quarantine/a-2");
        fs::create_directory(dir / ".quarantine/a-3");
        CHECK_EQ(fsck(dir).said, std::string("damaged a > a-4 done; "));
        CHECK_EQ(read_text(dir / ".quarantine/a-1"), std::string("a file"));
    }
    for (const bool is_link : { false, true }) {
        page_dir dir;
        make(dir);
        const temporary_dir elsewhere;
        is_link ? fs::create_directory_symlink(elsewhere.path, dir / ".quarantine") : write_text(dir / ".quarantine", "a file");
        const auto done = fsck(dir);
        CHECK_EQ(done.said, std::string("failed a; "));
        CHECK_EQ(done.status, SERVER_PAGE_FSCK_FAILED);
        CHECK(contains(done.whys, dir / ".quarantine" + ": no directory, but a file or a link, which is left alone"));
        CHECK(fs::exists(dir / "a") && fs::is_empty(elsewhere.path));
    }
}

// Its contents would tell gc that it was put aside in 1970.
TEST(a_page_cannot_speak_for_the_quarantine) {
    page_dir dir;
    for (const std::string name : { "why.txt", "x" }) {
        save(dir.files, name);
        flip_last(dir / (name + ".ckpt"));
        write_text(dir / name, "quarantined 0\n");
    }
    CHECK_EQ(fsck(dir).said, std::string("damaged why.txt > why.txt-1 done; damaged x > x-1 done; "));
    CHECK_EQ(read_text(dir / ".quarantine/why.txt-1/why.txt"), std::string("quarantined 0\n"));
    CHECK(contains(read_text(dir / ".quarantine/why.txt-1/.why.txt"), "quarantined 1790000000 (2026-09-21 14:13:20 UTC)\n'why.txt' "));
    CHECK_EQ(run(server_page_gc, dir.os, dir.path).said, std::string("quarantined .quarantine/why.txt-1; quarantined .quarantine/x-1; "));
}

TEST(gc_removes_what_has_been_in_quarantine_long_enough) {
    page_dir dir;
    save(dir.files, "a");
    flip_last(dir / "a");
    leave_pending(dir.os, dir.path, 2, 0);
    write_text(dir / "page.page-staging/commit", "damaged");
    CHECK_EQ(fsck(dir).said, std::string("damaged a > a-1 done; damaged page > page-1 done; "));
    fs::create_directory(dir / ".quarantine/by hand");
    write_text(dir / ".quarantine/by hand/file", "contents");

    uint64_t n_bytes = 0;
    for (const auto & entry : fs::directory_iterator(dir / ".quarantine/a-1")) {
        n_bytes += entry.file_size();
    }
    const auto gc = [&](int64_t now_s, bool dry_run = false, int64_t n_days = 30) { return run(server_page_gc, dir.os, dir.path, dry_run, now_s, n_days); };

    const auto young = gc(NOON + 30*DAY_S - 1);
    CHECK_EQ(young.said, std::string("quarantined .quarantine/a-1; quarantined .quarantine/by hand; quarantined .quarantine/page-1; "));
    CHECK(contains(young.whys, "put aside 29 days ago, kept for 30"));
    CHECK_EQ(young.findings[0].n_bytes, n_bytes);

    CHECK_EQ(gc(NOON + 30*DAY_S, true).said,
            std::string("quarantined .quarantine/a-1 remove; quarantined .quarantine/by hand; quarantined .quarantine/page-1 remove; "));
    CHECK(fs::exists(dir / ".quarantine/a-1/a"));

    CHECK_EQ(gc(NOON + 30*DAY_S).said,
            std::string("quarantined .quarantine/a-1 remove done; quarantined .quarantine/by hand; quarantined .quarantine/page-1 remove done; "));
    CHECK_EQ(everything(dir / ".quarantine"), std::string("by hand/\nby hand/file=contents\n"));

    save(dir.files, "a");
    flip_last(dir / "a");
    CHECK_EQ(fsck(dir).status, SERVER_PAGE_FSCK_DAMAGED);
    // a clock that goes wrong makes nothing old
    for (const std::string note : { "quarantined 0\n", "quarantined 1890000000\n" }) {
        write_text(dir / ".quarantine/a-1/.why.txt", note);
        const auto done = gc(NOON + 40*DAY_S);
        CHECK(contains(done.said, "quarantined .quarantine/a-1; "));
        CHECK(contains(done.whys, "does not say since when by a clock that is right, it is kept"));
    }
    CHECK(contains(gc(NOON - DAY_S, false, 0).said, "quarantined .quarantine/a-1 remove done; ")); // whatever its age
}

TEST(gc_that_is_interrupted_goes_on_the_next_time) {
    for (int at = 1; ; ++at) {
        page_dir dir;
        save(dir.files, "a");
        flip_last(dir / "a");
        CHECK_EQ(fsck(dir).status, SERVER_PAGE_FSCK_DAMAGED);

        faulty_os os(dir.os);
        os.at           = at;
        os.from_then_on = true;
        run(server_page_gc, os, dir.path, false, NOON + 31*DAY_S);
        if (!os.was_hit()) {
            break;
        }
        run(server_page_gc, dir.os, dir.path, false, NOON + 31*DAY_S);
        // an empty directory has nothing that says since when, and takes no room
        CHECK(everything(dir / ".quarantine").empty() || everything(dir / ".quarantine") == "a-1/\n");
    }
}

TEST(gc_tells_of_a_publication_that_cannot_be_completed) {
    page_dir dir;
    leave_pending(dir.os, dir.path, 2, 1);
    write_text(dir / "page.page-staging/commit", "damaged");
    const auto before = everything(dir.path);
    const auto done   = run(server_page_gc, dir.os, dir.path);
    CHECK_EQ(done.status, SERVER_PAGE_FSCK_FAILED);
    CHECK(contains(done.whys, "the commit record is damaged"));
    CHECK_EQ(everything(dir.path), before);
}
