// sources: server-page-fsck.cpp server-page-fsck-run.cpp server-page-quarantine.cpp server-page-gc.cpp server-page-check.cpp server-page-codec.cpp server-page-files.cpp server-page-guard.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// What fsck makes of publications that were interrupted.

#include "page-fsck-testing.h"
#include "page-files-fork.h"

TEST(what_was_interrupted_is_completed_before_it_is_judged) {
    page_dir dir;
    save(dir.files, "page", "the old state");
    faulty_os faulty(dir.os);
    faulty.only = "rename";
    faulty.at   = 3; // of the record, of FILE
    faulty.from_then_on = true;

    server_page_files files(faulty, dir.path);
    const auto state = state_of("the new state");
    server_page_ckpt ckpt;
    ckpt.identity.fields = { { "model", "m" } };
    ckpt.members = { { "", state.size(), server_page_checksum(state.data(), state.size()) } };
    const auto bytes = server_page_encode(ckpt);
    CHECK_EQ(files.publish("page", { { "", { span(state) } }, { ".ckpt", bytes.parts } }).status, SERVER_PAGE_FILES_PENDING);

    const auto before = everything(dir.path);
    const auto dry    = fsck(dir, true);
    CHECK_EQ(dry.said, std::string("recovered page; recovered page; pending page; "));
    CHECK_EQ(dry.status, SERVER_PAGE_FSCK_OK);
    CHECK_EQ(everything(dir.path), before);

    CHECK_EQ(fsck(dir).said, std::string("recovered page done; recovered page done; whole page; "));
    CHECK_EQ(read_text(dir / "page"), state);
    CHECK(!fs::exists(dir / "page.dft"));
}

TEST(a_publication_that_cannot_be_completed_is_put_aside_whole) {
    for (const bool has_record : { true, false }) {
        page_dir dir;
        save(dir.files, "a");
        leave_pending(dir.os, dir.path, 2, 0); // of "page"
        if (has_record) {
            write_text(dir / "page.page-staging/commit", "damaged");
        } else {
            fs::remove(staged_file(dir, "page.dft"));
        }
        CHECK_EQ(fsck(dir, true).said, std::string("whole a; damaged page > .quarantine; "));
        const auto done = fsck(dir);
        CHECK_EQ(done.said, std::string("whole a; damaged page > page-1 done; "));
        CHECK(contains(done.whys, "cannot be completed"));
        CHECK(fs::exists(dir / ".quarantine/page-1/page.page-staging/commit"));
        CHECK_EQ(fsck(dir).said, std::string("whole a; "));
        CHECK(publish(dir.files, 3).ok()); // the name works again
    }
}

// FILE.ckpt vouches for what is in place; only the staging directory is put aside.
TEST(a_page_that_is_good_without_the_damaged_record_stays) {
    for (const bool degraded : { false, true }) {
        page_dir dir;
        save(dir.files, "page");
        leave_pending(dir.os, dir.path, 2, 0);
        write_text(dir / "page.page-staging/commit", "damaged");
        if (degraded) {
            flip_last(dir / "page.dft");
        }
        const auto state = read_text(dir / "page");

        const std::string is = degraded ? "degraded page -.dft; " : "whole page; ";
        CHECK_EQ(fsck(dir, true).said, is + "damaged page.page-staging > .quarantine; ");
        CHECK(fs::exists(dir / "page.page-staging/commit"));
        const auto done = fsck(dir);
        CHECK_EQ(done.said, is + "damaged page.page-staging > page-1 done; ");
        CHECK_EQ(done.status, SERVER_PAGE_FSCK_DAMAGED);
        CHECK(contains(done.findings[1].why, "'page' has an interrupted publication that cannot be completed: "));
        CHECK_EQ(read_text(dir / "page"), state);
        CHECK_EQ(read_text(dir / ".quarantine/page-1/page.page-staging/commit"), std::string("damaged"));
        CHECK(!fs::exists(dir / ".quarantine/page-1/page"));
        CHECK_EQ(fsck(dir).said, is);
        CHECK(publish(dir.files, 3).ok()); // the name works again
    }
}

// Half of each generation, or nothing that vouches: nobody knows what that is.
TEST(a_page_that_nothing_vouches_for_goes_with_its_damaged_record) {
    for (const std::string kind : { "mixed", "another size", "plain" }) {
        page_dir dir;
        save(dir.files, "page");
        leave_pending(dir.os, dir.path, 2, 0);
        write_text(dir / "page.page-staging/commit", "damaged");
        write_text(dir / "page", state_of(kind == "another size" ? "of another size" : "THE STATE"));
        if (kind == "plain") {
            fs::remove(dir / "page.ckpt");
            fs::remove(dir / "page.dft");
        }
        CHECK_EQ(fsck(dir, true).said, std::string("damaged page > .quarantine; "));
        CHECK_EQ(fsck(dir).said, std::string("damaged page > page-1 done; "));
        CHECK(fs::exists(dir / ".quarantine/page-1/page") && fs::exists(dir / ".quarantine/page-1/page.page-staging"));
    }

    // none of ours
    page_dir dir;
    write_text(dir / "page", "a text of somebody's");
    leave_pending(dir.os, dir.path, 2, 0);
    write_text(dir / "page.page-staging/commit", "damaged");
    CHECK_EQ(fsck(dir).said, std::string("unknown page; damaged page.page-staging > page-1 done; "));
    CHECK_EQ(read_text(dir / "page"), std::string("a text of somebody's"));
}

TEST(a_page_whose_staged_successor_was_damaged_stays) {
    page_dir dir;
    save(dir.files, "page");
    leave_pending(dir.os, dir.path, 2, 0);
    flip_last(staged_file(dir, "page"));
    CHECK_EQ(fsck(dir, true).said, std::string("whole page; damaged page.page-staging > .quarantine; "));
    const auto done = fsck(dir);
    CHECK_EQ(done.said, std::string("whole page; damaged page.page-staging > page-1 done; "));
    CHECK(contains(done.whys, "it lists page, but what is there is another file, or was damaged after it was written"));
    CHECK_EQ(read_text(dir / "page"), state_of("the state"));
}

// What is in place counts as the new generation's only if it is that, not if it only is as long.
TEST(a_page_whose_staged_successor_is_gone_stays) {
    page_dir dir;
    save(dir.files, "page");
    const auto old = read_text(dir / "page");

    faulty_os faulty(dir.os);
    faulty.only = "rename";
    faulty.at   = 2; // of the record; then FILE
    faulty.from_then_on = true;
    const auto state = state_of("THE STATE");
    server_page_ckpt ckpt;
    ckpt.identity.fields = { { "model", "m" } };
    ckpt.members = { { "", state.size(), server_page_checksum(state.data(), state.size()) } };
    const auto bytes = server_page_encode(ckpt);
    server_page_files files(faulty, dir.path);
    CHECK_EQ(files.publish("page", { { "", { span(state) } }, { ".ckpt", bytes.parts } }).status, SERVER_PAGE_FILES_PENDING);
    CHECK_EQ(old.size(), state.size());
    fs::remove(staged_file(dir, "page"));

    CHECK_EQ(fsck(dir, true).said, std::string("whole page; damaged page.page-staging > .quarantine; "));
    CHECK_EQ(fsck(dir).said, std::string("whole page; damaged page.page-staging > page-1 done; "));
    CHECK_EQ(read_text(dir / "page"), old);
}

// Another program wrote one of the names while a publication was interrupted: it is neither replaced nor removed.
TEST(another_programs_file_stops_a_recovery) {
    for (const std::string suffix : { "", ".ckpt", ".lora", ".dft" }) {
        page_dir dir;
        faulty_os faulty(dir.os);
        faulty.only = "rename";
        faulty.at   = 2;
        faulty.from_then_on = true;
        server_page_files files(faulty, dir.path);
        const auto state = state_of("the state");
        CHECK_EQ(files.publish("page", { { "", { span(state) } } }).status, SERVER_PAGE_FILES_PENDING);
        write_text(dir / ("page" + suffix), "a letter of somebody's");

        const auto before = everything(dir.path);
        for (const bool dry_run : { true, false }) {
            const auto done = fsck(dir, dry_run);
            CHECK_EQ(done.status, SERVER_PAGE_FSCK_FAILED);
            CHECK_EQ(done.said, std::string("failed page; "));
            CHECK(contains(done.whys, "page" + suffix + " is another program's"));
            CHECK_EQ(everything(dir.path), before);
        }
        fs::rename(dir / ("page" + suffix), dir / "letter");
        CHECK_EQ(fsck(dir).said, std::string("unknown letter; recovered page done; recovered page done; plain page; "));
    }
}

// A name that cannot be recovered costs no other one its check; it is told once, under its own name.
TEST(what_is_no_staging_directory_stops_nothing_but_its_name) {
    const temporary_dir elsewhere;
    const std::vector<std::function<void(const std::string & path)>> kinds = {
        [](const std::string & path) { write_text(path, "a file"); },
        [&](const std::string & path) { fs::create_directory_symlink(elsewhere.path, path); },
        [](const std::string & path) { CHECK(mkfifo(path.c_str(), 0600) == 0); },
    };
    for (const auto & make : kinds) {
        page_dir dir;
        save(dir.files, "a");
        save(dir.files, "bad");
        flip_last(dir / "bad");
        save(dir.files, "page");
        save(dir.files, "z");
        fs::create_directory(dir / "z.page-staging"); // nothing is under way
        make(dir / "none.page-staging");
        make(dir / "page.page-staging");

        for (const bool dry_run : { true, false }) {
            const auto gc = run(server_page_gc, dir.os, dir.path, dry_run);
            CHECK_EQ(gc.said, std::string("failed none; failed page; "));
            CHECK_EQ(gc.status, SERVER_PAGE_FSCK_FAILED);
            CHECK(contains(gc.findings[1].why, dir / "page.page-staging"));

            const auto done = fsck(dir, dry_run);
            CHECK_EQ(done.said, std::string("whole a; damaged bad > ") + (dry_run ? ".quarantine" : "bad-1 done") + "; failed none; failed page; whole z; ");
            CHECK_EQ(done.status, SERVER_PAGE_FSCK_FAILED);
        }
        CHECK(fs::exists(fs::symlink_status(dir / "page.page-staging")) && fs::exists(dir / "page"));
        CHECK(!fs::exists(dir / "z.page-staging"));
    }
}

TEST(foreign_files_in_a_stage_are_told_and_the_page_is_judged) {
    page_dir dir;
    save(dir.files, "page");
    const auto stage = leave_stage(dir, "1-1");
    write_text(stage + "/notes.txt", "of a person");
    for (const bool dry_run : { true, false, false }) {
        const auto done = fsck(dir, dry_run);
        CHECK_EQ(done.said, std::string("failed page; whole page; "));
        CHECK_EQ(done.findings[0].why, stage + "/notes.txt: nothing that a publication makes, it is left alone");
    }
    CHECK_EQ(read_text(stage + "/notes.txt"), std::string("of a person"));
}

TEST(a_dry_run_changes_nothing_not_even_the_lock) {
    page_dir dir;
    fill(dir);
    leave_pending(dir.os, dir.path, 2, 0);
    leave_stage(dir, "1-1");
    fs::remove(dir / ".page-lock");
    const auto before = everything(dir.path);
    const auto dry = fsck(dir, true);
    run(server_page_gc, dir.os, dir.path, true);
    CHECK_EQ(everything(dir.path), before);

    // and tells what the other one does
    const auto count = [](const ran & done, server_page_finding_what what) {
        return std::count_if(done.findings.begin(), done.findings.end(), [&](const auto & finding) { return finding.what == what; });
    };
    const auto done = fsck(dir);
    CHECK_EQ(count(dry, SERVER_PAGE_FOUND_RECOVERED), 3);
    for (const auto what : { SERVER_PAGE_FOUND_RECOVERED, SERVER_PAGE_FOUND_ORPHAN, SERVER_PAGE_FOUND_FAILED }) {
        CHECK_EQ(count(done, what), count(dry, what));
    }
    CHECK(fs::exists(dir / ".page-lock"));
}

TEST(a_staging_directory_that_may_not_be_read_stops_nothing_but_its_name) {
    CHECK_EQ(in_child([]() {
        give_up_rights();
        page_dir dir;
        save(dir.files, "a");
        save(dir.files, "page");
        fs::create_directory(dir / "page.page-staging");
        CHECK(chmod((dir / "page.page-staging").c_str(), 0) == 0);
        for (const bool dry_run : { true, false }) {
            const auto done = fsck(dir, dry_run);
            CHECK_EQ(done.said, std::string("whole a; failed page; "));
            CHECK(contains(done.whys, dir / "page.page-staging"));
        }
        CHECK(chmod((dir / "page.page-staging").c_str(), 0700) == 0);
        CHECK_EQ(fsck(dir).said, std::string("whole a; whole page; "));
    }), 0);
}

// Whichever verb fails, the old generation stays whole, and the next fsck frees the name.
TEST(every_verb_fails_in_fsck_of_a_publication_that_cannot_be_completed) {
    for (const fault_moment moment : { FAULT_BEFORE, FAULT_AFTER }) {
        for (const bool from_then_on : { false, true }) {
            for (int at = 1, was_hit = true; was_hit; ++at) {
                page_dir dir;
                save(dir.files, "page");
                leave_pending(dir.os, dir.path, 2, 0);
                flip_last(staged_file(dir, "page"));

                faulty_os os(dir.os);
                os.at           = at;
                os.moment       = moment;
                os.from_then_on = from_then_on;
                const auto done = run(server_page_fsck, os, dir.path);
                was_hit = os.was_hit();
                CHECK(done.status == SERVER_PAGE_FSCK_FAILED || contains(done.said, "damaged page.page-staging > page-1 done"));

                CHECK(fsck(dir).status != SERVER_PAGE_FSCK_FAILED);
                CHECK_EQ(fsck(dir).said, std::string("whole page; "));
                CHECK_EQ(read_text(dir / "page"), state_of("the state"));
                CHECK(contains(everything(dir / ".quarantine"), "/page.page-staging/commit=page commit 2\n"));
            }
        }
    }
}
