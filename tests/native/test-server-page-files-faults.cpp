// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// Each verb of the native file system fails once, or from then on.

#include "page-files-sweeps.h"

#include <set>

namespace {

const std::vector<fault> FAULTS = {
    { SERVER_PAGE_OS_NO_SPACE,  FAULT_HALF,   false },
    { SERVER_PAGE_OS_OTHER,     FAULT_BEFORE, false },
    { SERVER_PAGE_OS_OTHER,     FAULT_AFTER,  false },
    { SERVER_PAGE_OS_NO_SPACE,  FAULT_HALF,   true },
    { SERVER_PAGE_OS_NO_ACCESS, FAULT_BEFORE, true },
    { SERVER_PAGE_OS_OTHER,     FAULT_AFTER,  true },
};

}

TEST(every_verb_fails_in_a_first_publication) {
    sweep_publishing(FAULTS, published({}), { 0 }, 2);
}

TEST(every_verb_fails_in_a_replacement_with_more_files) {
    sweep_publishing(FAULTS, published({ 1 }), { 1 }, 2);
}

TEST(every_verb_fails_in_a_replacement_with_fewer_files) {
    sweep_publishing(FAULTS, published({ 2 }), { 2 }, 3);
}

TEST(every_verb_fails_in_a_publication_that_finds_an_interrupted_one) {
    sweep_publishing(FAULTS, pending(2, 3, 1), { 2, 3 }, 4);
}

TEST(every_verb_fails_in_a_recovery) {
    for (const int n_moved : { 0, 1 }) {
        sweep(FAULTS, pending(2, 3, n_moved), recovering, [&](const server_page_files_result & res, const fault & cur, const std::string & dir) {
            CHECK(res.ok() || res.status == expected(cur.status));

            server_page_os & os = without_syncs();
            server_page_files files(os, dir);
            CHECK_EQ(read_generation(files), 3);
        });
    }
}

TEST(every_verb_fails_in_reading) {
    for (const auto & begin : { published({ 2, 3 }), pending(2, 3, 0), pending(2, 3, 1) }) {
        sweep(FAULTS, begin, reading, [&](const server_page_files_result & res, const fault & cur, const std::string & dir) {
            CHECK(res.ok() || res.status == expected(cur.status)); // never "there is no such page"

            server_page_os & os = without_syncs();
            server_page_files files(os, dir);
            CHECK_EQ(read_generation(files), 3);
        });
    }
}

TEST(every_verb_fails_in_listing) {
    sweep(FAULTS, pending(2, 3, 1),
        [](server_page_files & files) {
            std::vector<server_page_generation> found;
            const auto res = files.list(found);
            CHECK(!res.ok() || (found.size() == 1 && found[0].staged && found[0].name == NAME));
            return res;
        },
        [](const server_page_files_result & res, const fault & cur, const std::string &) {
            CHECK(res.ok() || res.status == expected(cur.status));
        });
}

// Before the record it is a failure, from then on the record stays; only the last one, after the record was dropped, warns.
TEST(a_directory_that_cannot_be_synced_is_never_success) {
    const temporary_dir dir;
    const server_page_files_status expected[] = {
        SERVER_PAGE_FILES_IO,      // the stage
        SERVER_PAGE_FILES_IO,      // the staging directory
        SERVER_PAGE_FILES_IO,      // the directory
        SERVER_PAGE_FILES_PENDING, // the staging directory, with the record
        SERVER_PAGE_FILES_PENDING, // the directory, with the files
        SERVER_PAGE_FILES_OK,      // the staging directory, without the record
    };

    for (int i = 0; i < 6; ++i) {
        dir.clear();
        server_page_files plain(without_syncs(), dir.path);
        CHECK(publish(plain, 2).ok());

        faulty_os faulty(without_syncs());
        faulty.only = "sync_dir";
        faulty.at   = i + 1;
        server_page_files files(faulty, dir.path);
        const auto res = publish(files, 3);
        CHECK_EQ(res.status, expected[i]);
        CHECK(contains(res.message, "a fault of the test"));

        std::vector<server_page_generation> found;
        CHECK(plain.list(found).ok());
        CHECK_EQ(found.size(), 1u);
        CHECK_EQ(found[0].staged, expected[i] == SERVER_PAGE_FILES_PENDING);
        CHECK_EQ(read_generation(plain), expected[i] == SERVER_PAGE_FILES_IO ? 2 : 3);
    }
}

// A second one dies after its record while the first one writes; the first one cannot complete that, and must not sweep it.
TEST(what_another_ones_record_lists_is_never_swept) {
    const temporary_dir dir;
    server_page_files plain(without_syncs(), dir.path);
    CHECK(publish(plain, 2).ok());

    faulty_os faulty(without_syncs());
    faulty.only = "rename";
    faulty.at   = 1;
    bool left = false;
    faulty.before = [&](const std::string & verb) {
        if (verb == "write" && !left) {
            left = true;
            leave_pending(without_syncs(), dir.path, 4, 1);
        }
    };
    server_page_files files(faulty, dir.path);
    CHECK_EQ(publish(files, 3).status, SERVER_PAGE_FILES_IO);
    CHECK(left);
    CHECK_EQ(read_generation(plain), 4);
    check_next_works(without_syncs(), dir.path);
}
