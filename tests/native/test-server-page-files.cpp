// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-*.cpp

#include "page-files-testing.h"

#include "server-page-record.h"

#include <algorithm>

namespace {

namespace fs = std::filesystem;

std::string joined(const std::vector<server_page_generation> & generations) {
    std::string res;
    for (const auto & generation : generations) {
        res += generation.name + (generation.staged ? "!" : "") + ":";
        for (const auto & file : generation.files) {
            res += " '" + file.suffix + "' " + std::to_string(file.n_bytes);
        }
        res += "; ";
    }
    return res;
}

std::string listed(server_page_files & files) {
    std::vector<server_page_generation> generations;
    CHECK(files.list(generations).ok());
    return joined(generations);
}

}

TEST(what_is_published_is_read_and_listed) {
    page_dir dir;
    server_page_files_result res;
    CHECK_EQ(read_generation(dir.files, res), 0);
    CHECK(contains(res.message, dir / "page"));
    CHECK_EQ(listed(dir.files), std::string());

    CHECK(publish(dir.files, 2).ok());
    CHECK_EQ(read_generation(dir.files), 2);
    CHECK_EQ(read_text(dir / "page.dft"), contents_of(2, ".dft"));
    CHECK(publish(dir.files, 3, "other page").ok());
    CHECK_EQ(listed(dir.files), std::string("other page: '' 56 '.ckpt' 61; page: '' 55 '.ckpt' 60 '.dft' 59 '.lora' 60; "));

    CHECK(publish(dir.files, 3).ok());
    CHECK_EQ(read_generation(dir.files), 3);
    CHECK(!fs::exists(dir / "page.dft"));
    CHECK(!has_staging(dir.os, dir.path));
}

TEST(a_reader_asks_for_what_it_wants_and_may_decline) {
    page_dir dir(2);

    std::string asked;
    std::vector<uint8_t> memory(1000);
    const auto ask = [&](const std::string & suffix, uint64_t n_bytes) {
        asked += "'" + suffix + "' " + std::to_string(n_bytes) + " ";
        return suffix == ".lora" ? nullptr : memory.data();
    };

    CHECK(dir.files.read(NAME, { "", ".ckpt" }, ask).ok());
    CHECK_EQ(asked, std::string("'' 55 '.ckpt' 60 "));
    CHECK_EQ(std::string(memory.begin(), memory.begin() + 60), contents_of(2, ".ckpt"));

    memory.assign(1000, 0);
    const auto declined = dir.files.read(NAME, { "", ".lora" }, ask);
    CHECK_EQ(declined.status, SERVER_PAGE_FILES_DECLINED);
    CHECK(contains(declined.message, dir / "page.lora"));
    CHECK_EQ(int(memory[0]), 0); // nothing was read

    CHECK_EQ(dir.files.read(NAME, { "/../page" }, ask).status, SERVER_PAGE_FILES_BAD_NAME);

    // there is a page where there is NAME, asked for or not
    fs::remove(dir / "page");
    CHECK_EQ(dir.files.read(NAME, { "", ".ckpt" }, ask).status, SERVER_PAGE_FILES_NOT_FOUND);
    CHECK_EQ(dir.files.read(NAME, { ".ckpt" }, ask).status, SERVER_PAGE_FILES_NOT_FOUND);
}

TEST(empty_files_are_files) {
    page_dir dir;
    CHECK(dir.files.publish(NAME, { { "", {} }, { ".ckpt", { { nullptr, 0 } } } }).ok());
    int n_asked = 0;
    CHECK(dir.files.read(NAME, { "", ".ckpt" }, [&](const std::string &, uint64_t n_bytes) -> uint8_t * {
        CHECK_EQ(n_bytes, 0u);
        n_asked++;
        return nullptr;
    }).ok());
    CHECK_EQ(n_asked, 2);
}

TEST(files_that_make_no_page_are_refused) {
    page_dir dir(2);
    const std::vector<std::vector<server_page_file>> bad = {
        {}, { { ".ckpt", {} } }, { { "", {} }, { "", {} } }, { { "", {} }, { ".exe", {} } }, { { "", {} }, { "/../x", {} } },
    };
    for (const auto & files : bad) {
        CHECK_EQ(dir.files.publish(NAME, files).status, SERVER_PAGE_FILES_BAD_NAME);
    }
    CHECK_EQ(read_generation(dir.files), 2);
    CHECK(!has_staging(dir.os, dir.path));
}

TEST(hostile_names_are_refused_everywhere) {
    page_dir dir;
    const std::vector<std::string> bad = {
        "", ".", "..", ".hidden", "a/b", "../a", "/etc/passwd", "a\\b", std::string("a\0b", 3), "a\nb", "a\x7f", "a.ckpt", "a.CKPT",
        "a.Lora", "a.dft", "a.page-staging", "a.Page-Staging", "a:b", "a*", "a?", "a\"", "a<", "a>", "a|", "a.", "a ", " a", "a\xc2\x85" "b",
        "con", "NUL", "Aux.txt", "prn.a.b", "com1.x", "COM0", "lpt9", "lpt5.bin", "com\xc2\xb9", "LPT\xc2\xb3.x", "nul .txt", "CONIN$", "conout$",
        std::string(201, 'a'), "\xff", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "a\xc3",
    };
    for (const auto & name : bad) {
        CHECK(!server_page_file_name_error(name).empty());
        CHECK_EQ(publish(dir.files, 1, name).status, SERVER_PAGE_FILES_BAD_NAME);
        std::vector<std::string> done;
        CHECK_EQ(dir.files.recover(name, false, done).status, SERVER_PAGE_FILES_BAD_NAME);
        server_page_files_result res;
        read_generation(dir.files, res, name);
        CHECK_EQ(res.status, SERVER_PAGE_FILES_BAD_NAME);
    }
    CHECK(fs::is_empty(dir.path));

    const std::vector<std::string> good = {
        "a", "lock", "commit", "a b", "a\xc2\xa0" "b", "-rf", "a.bin", "a.ckpt.bin", "a..b", "cone", "a.con", "com", "com10", "com1x", "lpt\xc2\xb5", "null", std::string(200, 'a'), "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", "7-1",
    };
    leave_pending(dir.os, dir.path, 4, 0); // of another page: in nobody's way
    for (const auto & name : good) {
        CHECK_EQ(server_page_file_name_error(name), std::string());
        CHECK(publish(dir.files, 2, name).ok());
        CHECK_EQ(read_generation(dir.files, name), 2);
        CHECK(publish(dir.files, 3, name).ok());
        CHECK_EQ(read_generation(dir.files, name), 3);
    }
}

// Longer than some systems take a path as it is, and not of the letters of any one code page.
TEST(a_directory_has_any_name_and_any_depth) {
    const temporary_dir root;
    auto & os = server_page_os_native();

    std::vector<server_page_os_path> dirs = { { root.path, "" } };
    for (int i = 0; i < 6; ++i) {
        bool made = false;
        dirs.push_back(dirs.back() / ("\xc3\xa4 \xe6\xa8\xa1 \xd0\xb6 \xf0\x9f\xa6\x99" + std::string(60, 'x')));
        CHECK(os.make_dir(dirs.back(), made).ok() && made);
    }
    server_page_files files(os, dirs.back().str() + "/"); // as some people write a directory
    for (const int generation : { 2, 3, 4 }) {
        CHECK(publish(files, generation, "\xe6\xa8\xa1").ok());
        CHECK_EQ(read_generation(files, "\xe6\xa8\xa1"), generation);
    }
    CHECK_EQ(listed(files), std::string("\xe6\xa8\xa1: '' 57 '.ckpt' 62 '.dft' 61 '.lora' 62; "));
    for (const auto & suffix : suffixes_of(4)) {
        CHECK(os.remove(dirs.back() / ("\xe6\xa8\xa1" + suffix)).ok());
    }

    // not left to the library, which has its own limits
    CHECK(os.remove(dirs.back() / ".page-lock").ok());
    for (; dirs.size() > 1; dirs.pop_back()) {
        CHECK(os.remove_dir(dirs.back()).ok());
    }
}

// A publication is interrupted after its record for a name with everything in it that the record must quote.
TEST(a_record_carries_any_name) {
    for (const std::string name : { " a  b ", "1 2", "file 3 x" }) {
        server_page_record rec;
        rec.stage   = "1-2";
        rec.members = { { name, UINT64_MAX, UINT64_MAX - 1 }, { name + ".ckpt", 0, 7 } };
        rec.retired = { name + ".dft" };
        const auto text = server_page_record_text(rec);

        server_page_record found;
        CHECK(server_page_record_parse(name, text, found));
        CHECK_EQ(server_page_record_text(found), text);
        CHECK_EQ(found.members.size(), 2u);
        CHECK_EQ(found.members[0].n_bytes, UINT64_MAX);
        CHECK_EQ(found.members[0].checksum, UINT64_MAX - 1);
        CHECK_EQ(found.members[1].checksum, 7u);
        CHECK(!server_page_record_parse(name + "x", text, found)); // of another page

        for (size_t i = 0; i < text.size(); ++i) {
            auto damaged = text;
            damaged[i] ^= 1;
            CHECK(!server_page_record_parse(name, damaged, found));
            CHECK(!server_page_record_parse(name, text.substr(0, i), found));
        }
        CHECK(!server_page_record_parse(name, text + "\n", found));
    }

    // a good checksum is no leave to go elsewhere
    server_page_record found;
    server_page_record outside;
    outside.stage   = "../1";
    outside.members = { { "page", 1, 2 } };
    CHECK(!server_page_record_parse("page", server_page_record_text(outside), found));
    outside.stage   = "1-2";
    outside.retired = { "page/../x" };
    CHECK(!server_page_record_parse("page", server_page_record_text(outside), found));
    outside.retired = { "page" }; // the new one
    CHECK(!server_page_record_parse("page", server_page_record_text(outside), found));
    outside.retired = { "page.dft" };
    CHECK(server_page_record_parse("page", server_page_record_text(outside), found));

    // without a new NAME the page would be gone
    outside.members.clear();
    CHECK(!server_page_record_parse("page", server_page_record_text(outside), found));
    outside.retired = { "page", "page.dft" };
    CHECK(!server_page_record_parse("page", server_page_record_text(outside), found));
}

// What came under a name while the new generation was written stops it, before anything is replaced.
TEST(what_a_guard_refuses_is_not_replaced) {
    page_dir dir;
    CHECK(publish(dir.files, 1).ok());
    int n_asked = 0;
    const server_page_guard second_time = [&](server_page_os &, const std::string &, const std::string & name) -> server_page_files_result {
        CHECK_EQ(name, std::string("page"));
        return ++n_asked < 2 ? server_page_files_result() : server_page_files_result { SERVER_PAGE_FILES_IO, "not yours" };
    };
    server_page_files files(dir.os, dir.path, second_time);
    const auto res = publish(files, 2);
    CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
    CHECK_EQ(res.message, std::string("not yours"));
    CHECK_EQ(n_asked, 2);
    CHECK_EQ(read_generation(dir.files), 1);
    CHECK(!std::filesystem::exists(dir / "page.page-staging"));
}

TEST(a_damaged_record_is_named_and_left) {
    page_dir dir(2);
    leave_pending(dir.os, dir.path, 3, 1);
    const auto path = dir / "page.page-staging/commit";
    const auto text = read_text(path);

    for (const auto & damaged : { std::string(), text.substr(0, text.size() / 2), text + text, std::string(5000, 'x') }) {
        write_text(path, damaged);

        server_page_files_result read;
        CHECK_EQ(read_generation(dir.files, read), -1);
        std::vector<std::string> done;
        for (const auto & res : { read, publish(dir.files, 4), dir.files.recover(NAME, false, done), dir.files.recover(NAME, true, done) }) {
            CHECK_EQ(res.status, SERVER_PAGE_FILES_CORRUPT);
            CHECK(contains(res.message, path));
            CHECK(contains(res.message, "llamactl pages fsck puts it aside"));
        }
        CHECK(done.empty());
        CHECK_EQ(read_text(path), damaged);
    }

    write_text(path, text);
    CHECK_EQ(read_generation(dir.files), 3); // nothing was touched
}

TEST(a_record_that_lists_what_is_not_there_is_corrupt) {
    page_dir dir(2);
    leave_pending(dir.os, dir.path, 4, 1);
    const auto staged = staged_file(dir, "page.lora");

    for (const std::string wrong : { "short", "" }) {
        write_text(staged, wrong);
        if (wrong.empty()) {
            fs::remove(staged); // what is in its place is of the old generation, and of another size
            write_text(dir / "page.lora", "old");
        }
        server_page_files_result res;
        CHECK_EQ(read_generation(dir.files, res), -1);
        CHECK_EQ(res.status, SERVER_PAGE_FILES_CORRUPT);
        CHECK(contains(res.message, "page.lora"));
        CHECK(fs::exists(dir / "page.page-staging/commit"));
    }
}

TEST(a_stage_is_swept_when_its_owner_is_dead_and_only_then) {
    page_dir dir(2);
    const auto own_pid = leave_stage(dir, std::to_string(dir.os.process_id()) + "-999999"); // used again, or of another container
    const auto no_lock = dir / "page.page-staging/4-4";
    fs::create_directories(no_lock);

    faulty_os writing(dir.os);
    int n_seen = 0;
    writing.before = [&](const std::string & verb) {
        if (verb != "write" || n_seen++ > 0) {
            return;
        }
        CHECK(!fs::exists(own_pid)); // the publication made room before it wrote
        const auto dead = leave_stage(dir, "1-1");
        std::vector<std::string> done;
        CHECK(dir.files.recover(NAME, true, done).ok());
        CHECK_EQ(done.size(), 1u);
        CHECK(contains(done[0], dead));
        CHECK(fs::exists(dead));
        CHECK(dir.files.recover(NAME, false, done).ok());
        CHECK_EQ(done.size(), 1u);
        CHECK(!fs::exists(dead));

        CHECK(publish(dir.files, 4).ok()); // another one of the same name overtakes it
        CHECK_EQ(read_generation(dir.files), 4);
    };
    server_page_files files(writing, dir.path);
    CHECK(publish(files, 3).ok());
    CHECK(n_seen > 0);
    CHECK_EQ(read_generation(dir.files), 3);
    CHECK(!has_staging(dir.os, dir.path));
}

// The stage of the record is one of them: its completion leaves it to nobody.
TEST(recovery_tells_what_it_would_do_and_what_it_did) {
    page_dir dir(2);
    leave_pending(dir.os, dir.path, 3, 1);
    leave_stage(dir, "1-1");
    CHECK(contains(listed(dir.files), "page!:"));

    const auto told = [&](bool dry_run) {
        std::vector<std::string> done;
        CHECK(dir.files.recover(NAME, dry_run, done).ok());
        std::sort(done.begin(), done.end());
        return done;
    };

    const auto dry = told(true);
    CHECK(contains(listed(dir.files), "page!:"));
    const auto real = told(false);
    CHECK_EQ(dry.size(), 3u);
    CHECK_EQ(real.size(), 3u);
    CHECK_EQ(dry[0], dir / "page.page-staging/1-1" + ": nobody owns this stage, it would be removed");
    CHECK_EQ(real[0], dir / "page.page-staging/1-1" + ": nobody owned this stage, it was removed");
    CHECK(contains(real[1], "page.page-staging/" + std::to_string(dir.os.process_id()) + "-"));
    CHECK_EQ(dry[1].substr(0, dry[1].rfind(": ")), real[1].substr(0, real[1].rfind(": ")));
    CHECK_EQ(dry[2], dir / "page" + ": its publication would be completed");
    CHECK_EQ(real[2], dir / "page" + ": its publication was completed");

    CHECK_EQ(read_generation(dir.files), 3);
    CHECK(!has_staging(dir.os, dir.path));
    CHECK(told(false).empty());
}

// By bit rot, or by a loss of power on a disk that says what is not so. Its size is right.
TEST(what_was_damaged_after_its_record_replaces_nothing) {
    for (const std::string suffix : { "", ".ckpt", ".lora", ".dft" }) {
        page_dir dir(3);
        leave_pending(dir.os, dir.path, 4, 0);
        const auto staged = staged_file(dir, "page" + suffix);
        auto text = read_text(staged);
        text.back() ^= 1;
        write_text(staged, text);

        server_page_files_result read;
        CHECK_EQ(read_generation(dir.files, read), -1);
        std::vector<std::string> done;
        for (const auto & res : { dir.files.recover(NAME, true, done), dir.files.recover(NAME, false, done), read, publish(dir.files, 5) }) {
            CHECK_EQ(res.status, SERVER_PAGE_FILES_CORRUPT);
            CHECK(contains(res.message, "it lists page" + suffix + ", but what is there is another file, or was damaged"));
        }
        CHECK(done.empty());
        for (const auto & old : suffixes_of(3)) {
            CHECK_EQ(read_text(dir / ("page" + old)), contents_of(3, old));
        }
        CHECK(fs::exists(staged) && !fs::exists(dir / "page.dft"));

        text.back() ^= 1;
        write_text(staged, text);
        CHECK_EQ(read_generation(dir.files), 4);
    }
}

// Larger than what is read at once, with the damage in either piece.
TEST(large_contents_are_read_whole_before_they_replace_anything) {
    const std::string large(1500*1000, 'x');
    for (const size_t at : { size_t(0), large.size() - 1 }) {
        page_dir dir(3);
        faulty_os faulty(dir.os);
        faulty.only = "rename";
        faulty.at   = 2;
        faulty.from_then_on = true;
        server_page_files files(faulty, dir.path);
        CHECK_EQ(files.publish(NAME, { { "", { { large.data(), 10 }, { large.data() + 10, large.size() - 10 } } } }).status, SERVER_PAGE_FILES_PENDING);

        auto damaged = large;
        damaged[at] ^= 1;
        write_text(staged_file(dir, "page"), damaged);
        std::vector<std::string> done;
        CHECK_EQ(dir.files.recover(NAME, false, done).status, SERVER_PAGE_FILES_CORRUPT);
        write_text(staged_file(dir, "page"), large);
        CHECK(dir.files.recover(NAME, false, done).ok());
        CHECK_EQ(read_text(dir / "page"), large);
    }
}

// What it has just written is not read again.
TEST(a_publication_reads_nothing) {
    page_dir dir(2);
    faulty_os watched(dir.os);
    watched.before = [](const std::string & verb) { CHECK(verb != "read"); };
    server_page_files files(watched, dir.path);
    CHECK(publish(files, 3).ok());
}

// Whoever recovers holds back before the first move, not half-way.
TEST(a_taken_place_stops_a_recovery_before_it_begins) {
    page_dir dir(3);
    leave_pending(dir.os, dir.path, 4, 0);
    fs::create_directory(dir / "page.dft");
    std::vector<std::string> done;
    for (const bool dry_run : { true, false }) {
        const auto res = dir.files.recover(NAME, dry_run, done);
        CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
        CHECK(contains(res.message, dir / "page.dft"));
    }
    CHECK_EQ(read_text(dir / "page"), contents_of(3, ""));
}

TEST(foreign_files_in_a_dead_stage_are_left_and_told) {
    for (const bool is_dir : { false, true }) {
        for (const std::string name : { "notes.txt", "page.txt", "commit" }) {
            page_dir dir(2);
            const auto stage = leave_stage(dir, "1-1");
            const auto alien = stage + "/" + name;
            is_dir ? fs::create_directory(alien), void() : write_text(alien, "of a person");

            std::vector<std::string> done;
            const auto dry = dir.files.recover(NAME, true, done);
            CHECK(done.empty() && fs::exists(stage + "/page"));
            const auto real = dir.files.recover(NAME, false, done);
            CHECK(done.empty());
            for (const auto & res : { dry, real }) {
                CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
                CHECK_EQ(res.message, alien + ": nothing that a publication makes, it is left alone");
            }
            CHECK(fs::exists(alien) && !fs::exists(stage + "/page") && !fs::exists(stage + "/.lock"));
            CHECK(publish(dir.files, 3).ok());
            CHECK(fs::exists(alien));

            fs::remove(alien);
            CHECK(dir.files.recover(NAME, false, done).ok());
            CHECK(!has_staging(dir.os, dir.path));
        }
    }
    // one of our names that is no file is not ours
    page_dir dir(2);
    const auto stage = leave_stage(dir, "1-1");
    fs::create_directories(stage + "/page.dft/x");
    std::vector<std::string> done;
    CHECK(contains(dir.files.recover(NAME, false, done).message, stage + "/page.dft: nothing that"));
    CHECK(fs::exists(stage + "/page.dft/x"));
}

// A list tells that there is something; whoever recovers that name finds out what.
TEST(what_is_no_staging_directory_is_listed_and_left) {
    page_dir dir(2);
    CHECK(publish(dir.files, 3, "b").ok());
    write_text(dir / "a.page-staging", "a file");
    CHECK_EQ(listed(dir.files), std::string("a!:; b: '' 56 '.ckpt' 61; page: '' 55 '.ckpt' 60 '.dft' 59 '.lora' 60; "));
    std::vector<std::string> done;
    const auto res = dir.files.recover("a", false, done);
    CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
    CHECK(contains(res.message, dir / "a.page-staging"));
    CHECK_EQ(read_text(dir / "a.page-staging"), std::string("a file"));
}
