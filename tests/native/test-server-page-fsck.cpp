// sources: server-page-fsck.cpp server-page-fsck-run.cpp server-page-quarantine.cpp server-page-gc.cpp server-page-check.cpp server-page-codec.cpp server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

#include "page-files-testing.h"
#include "page-memory-os.h"

#include "server-page-fsck.h"
#include "server-page-os-behind.h"

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include <sys/stat.h>

namespace {

namespace fs = std::filesystem;

constexpr uint32_t MAGIC   = 0x67677371;
constexpr uint32_t VERSION = 3;
constexpr int64_t  NOON    = 1790000000;
constexpr int64_t  DAY_S   = 24*60*60;

std::string u32(uint32_t value) {
    return { char(value & 0xff), char(value >> 8 & 0xff), char(value >> 16 & 0xff), char(value >> 24) };
}

server_page_span span(const std::string & text) { return { text.data(), text.size() }; }

std::string state_of(const std::string & text) { return u32(MAGIC) + u32(VERSION) + u32(1) + u32(10) + text; }

// FILE, FILE.ckpt and FILE.dft; damaged: FILE.ckpt has another checksum
void save(server_page_files & files, const std::string & name, const std::string & text = "the state", bool damaged = false) {
    const auto state = state_of(text);

    server_page_draft draft;
    draft.state = span(text);
    const auto bytes_draft = server_page_encode(draft);

    server_page_ckpt ckpt;
    ckpt.identity.fields = { { "model", "m" } };
    ckpt.members = { { "", state.size(), server_page_checksum(state.data(), state.size()) ^ damaged }, { ".dft", 0, server_page_checksum(bytes_draft.parts) } };
    for (const auto & part : bytes_draft.parts) {
        ckpt.members[1].n_bytes += part.size;
    }
    const auto bytes_ckpt = server_page_encode(ckpt);
    CHECK_EQ(bytes_draft.error + bytes_ckpt.error, std::string());
    CHECK(files.publish(name, { { "", { span(state) } }, { ".ckpt", bytes_ckpt.parts }, { ".dft", bytes_draft.parts } }).ok());
}

void flip_last(const std::string & path) {
    auto text = read_text(path);
    text.back() ^= 1;
    write_text(path, text);
}

std::string said(const server_page_finding & finding) {
    static const char * const words[] = { "whole", "plain", "degraded", "damaged", "unknown", "pending", "recovered", "orphan", "quarantined", "failed", "waiting" };

    std::string res = std::string(words[finding.what]) + " " + finding.name;
    for (const auto & loss : finding.losses) {
        res += " -" + loss.suffix;
    }
    if (!finding.to.empty()) {
        res += " > " + fs::path(finding.to).filename().string();
    }
    return res + (finding.removes ? " remove" : "") + (finding.done ? " done" : "") + "; ";
}

struct ran {
    std::string said;
    std::string whys;

    std::vector<server_page_finding> findings;

    server_page_fsck_status status;
};

typedef server_page_fsck_status (*verb_t)(server_page_os &, const std::string &, const server_page_fsck_options &, const server_page_tell &);

ran run(verb_t verb, server_page_os & os, const std::string & dir, bool dry_run = false, int64_t now_s = NOON, int64_t n_days = 30) {
    server_page_fsck_options options;
    options.dry_run = dry_run;
    options.magic   = MAGIC;
    options.version = VERSION;
    options.now_s   = now_s;
    options.n_days  = n_days;

    ran res;
    res.status = verb(os, dir, options, [&](const server_page_finding & finding) {
        res.said += said(finding);
        res.whys += finding.why + "\n";
        res.findings.push_back(finding);
    });
    return res;
}

ran fsck(const page_dir & dir, bool dry_run = false) { return run(server_page_fsck, dir.os, dir.path, dry_run); }

// names, modes and contents of all there is
std::string everything(const std::string & dir) {
    std::vector<std::string> lines;
    for (const auto & entry : fs::recursive_directory_iterator(dir)) {
        lines.push_back(fs::relative(entry.path(), dir).string() + (entry.is_regular_file() ? "=" + read_text(entry.path().string()) : "/"));
    }
    std::sort(lines.begin(), lines.end());
    std::string res;
    for (const auto & line : lines) {
        res += line + "\n";
    }
    return res;
}

unsigned mode_of(const std::string & path) {
    struct stat st;
    CHECK(lstat(path.c_str(), &st) == 0);
    return st.st_mode & 07777;
}

// a directory with one of each
void fill(page_dir & dir) {
    save(dir.files, "good");
    save(dir.files, "bad");
    flip_last(dir / "bad");
    save(dir.files, "less");
    flip_last(dir / "less.dft");
    write_text(dir / "plain", state_of("x"));
    write_text(dir / "readme", "a text of somebody's");
    save(dir.files, "gone");
    fs::remove(dir / "gone");
    write_text(dir / "other.lora", "another program's");
}

const char * const FILLED = "whole good; degraded less -.dft; unknown other.lora; plain plain; unknown readme; ";

}

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
            std::string("quarantined 1790000000\n'bad' is damaged: it is not what was written with 'bad.ckpt'\n"));
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
            fs::remove(*std::find_if(fs::recursive_directory_iterator(dir / "page.page-staging"), fs::recursive_directory_iterator(),
                    [](const auto & entry) { return entry.path().filename() == "page.dft"; }));
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
            std::string("quarantined 1790000000\n'gone.ckpt': there is no 'gone' that it belongs to\n'gone.dft': there is no 'gone' that it belongs to\n"));
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
    CHECK(contains(gc(NOON - DAY_S, false, 0).said, "quarantined .quarantine/a-1 remove done; ")); // a clock that went back
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
    CHECK(contains(read_text(dir / ".quarantine/why.txt-1/.why.txt"), "quarantined 1790000000\n'why.txt' "));
    CHECK_EQ(run(server_page_gc, dir.os, dir.path).said, std::string("quarantined .quarantine/why.txt-1; quarantined .quarantine/x-1; "));
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
    for (const auto & entry : fs::recursive_directory_iterator(dir / "page.page-staging")) {
        if (entry.path().filename() == "page") {
            flip_last(entry.path().string());
        }
    }
    CHECK_EQ(fsck(dir, true).said, std::string("whole page; damaged page.page-staging > .quarantine; "));
    const auto done = fsck(dir);
    CHECK_EQ(done.said, std::string("whole page; damaged page.page-staging > page-1 done; "));
    CHECK(contains(done.whys, "it lists page, which was damaged after it was written"));
    CHECK_EQ(read_text(dir / "page"), state_of("the state"));
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
    const std::string large(2000*1000, 'x');
    write_text(dir / "film", large);
    write_text(dir / "film.lora", large);
    write_text(dir / "notes.dft", large);
    counting_os os(dir.os);
    CHECK_EQ(run(server_page_fsck, os, dir.path).said, std::string("unknown film; unknown notes.dft; "));
    CHECK(os.n_read <= 3*64*1024);

    // nor beside one of ours
    save(dir.files, "page", "the state " + std::string(100*1000, 'y'));
    write_text(dir / "page.lora", large);
    os.n_read = 0;
    const auto done = run(server_page_fsck, os, dir.path);
    CHECK_EQ(done.said, std::string("unknown film; unknown notes.dft; whole page; "));
    CHECK_EQ(done.findings[0].n_bytes, 2*large.size());
    CHECK(os.n_read < 1000*1000);

    // what is beside sidecars of ours is read whole: it is FILE, damaged
    write_text(dir / "page", large);
    CHECK_EQ(fsck(dir).said, std::string("unknown film; unknown notes.dft; damaged page > page-1 done; "));
    CHECK_EQ(read_text(dir / "page.lora"), large);
}

TEST(a_dry_run_changes_nothing_not_even_the_lock) {
    page_dir dir;
    fill(dir);
    leave_pending(dir.os, dir.path, 2, 1);
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
