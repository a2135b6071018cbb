// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// Each verb of the native file system fails once, or from then on, or takes the process with it.

#include "page-files-testing.h"

#include <set>

namespace {

struct fault {
    server_page_os_status status;
    fault_moment          moment;
    bool                  from_then_on;
};

const fault FAULTS[] = {
    { SERVER_PAGE_OS_NO_SPACE,  FAULT_HALF,   false },
    { SERVER_PAGE_OS_OTHER,     FAULT_BEFORE, false },
    { SERVER_PAGE_OS_OTHER,     FAULT_AFTER,  false },
    { SERVER_PAGE_OS_NO_SPACE,  FAULT_HALF,   true },
    { SERVER_PAGE_OS_NO_ACCESS, FAULT_BEFORE, true },
    { SERVER_PAGE_OS_OTHER,     FAULT_AFTER,  true },
};

server_page_files_status expected(server_page_os_status status) {
    return status == SERVER_PAGE_OS_NO_SPACE ? SERVER_PAGE_FILES_NO_SPACE
        : status == SERVER_PAGE_OS_NO_ACCESS ? SERVER_PAGE_FILES_NO_ACCESS : SERVER_PAGE_FILES_IO;
}

// nobody can tell here what is durable, and to make it so takes long
server_page_os & without_syncs() {
    static faulty_os res(server_page_os_native(), true);
    return res;
}

// what the directory holds before the fault
typedef std::function<void(server_page_os & os, const std::string & dir)> start;

start published(std::vector<int> generations) {
    return [=](server_page_os & os, const std::string & dir) {
        server_page_files files(os, dir);
        for (const int generation : generations) {
            CHECK(publish(files, generation).ok());
        }
    };
}

start pending(int old, int next, int n_moved) {
    return [=](server_page_os & os, const std::string & dir) {
        published({ old })(os, dir);
        leave_pending(os, dir, next, n_moved);
    };
}

void check_next_works(server_page_os & os, const std::string & dir) {
    server_page_files files(os, dir);
    for (const int next : { 8, 9 }) {
        CHECK(publish(files, next).ok());
        CHECK_EQ(read_generation(files), next);
        CHECK(!has_staging(os, dir));
    }
}

// `act` is run with each of its verbs failing in each way, `check` sees what it returned and what came of it
void sweep(const start & begin, const std::function<server_page_files_result(server_page_files & files)> & act,
        const std::function<void(const server_page_files_result & res, const fault & cur, const std::string & dir)> & check) {
    const temporary_dir dir;
    server_page_os & os = without_syncs();

    for (const auto & cur : FAULTS) {
        bool hit = true;
        for (int at = 1; hit; ++at) {
            dir.clear();
            begin(os, dir.path);

            faulty_os faulty(os);
            faulty.at           = at;
            faulty.from_then_on = cur.from_then_on;
            faulty.moment       = cur.moment;
            faulty.status       = cur.status;
            server_page_files files(faulty, dir.path);
            const auto res = act(files);

            hit = faulty.was_hit();
            CHECK(hit || res.ok());
            CHECK(hit || res.message.empty());
            if (!res.ok()) {
                CHECK(contains(res.message, "a fault of the test"));
                CHECK(contains(res.message, dir.path));
            }
            check(res, cur, dir.path);
            check_next_works(os, dir.path);
        }
    }
}

void sweep_publishing(const start & begin, const std::set<int> & old, int generation) {
    sweep(begin, [&](server_page_files & files) { return publish(files, generation); },
        [&](const server_page_files_result & res, const fault & cur, const std::string & dir) {
            if (!res.ok() && res.status != SERVER_PAGE_FILES_PENDING) {
                CHECK_EQ(res.status, expected(cur.status));
                CHECK(cur.from_then_on || old.size() > 1 || !has_staging(server_page_os_native(), dir));
            }

            server_page_os & os = without_syncs();
            server_page_files files(os, dir);
            const int found = read_generation(files);
            const bool is_new = found == generation;
            CHECK(is_new || old.count(found) == 1);
            CHECK(res.status == SERVER_PAGE_FILES_PENDING || is_new == res.ok());
        });
}

// each verb of `act` takes the process with it; then one of `allowed` is found, and recovery leaves no stage
void sweep_crashes(const start & begin, const std::function<server_page_files_result(server_page_files & files)> & act,
        const std::set<int> & allowed, int after) {
    const temporary_dir dir;
    server_page_os & os = without_syncs();

    for (const auto moment : { FAULT_BEFORE, FAULT_HALF, FAULT_AFTER }) {
        bool died = true;
        for (int at = 1; died; ++at) {
            dir.clear();
            begin(os, dir.path);

            const int code = in_child([&]() {
                faulty_os faulty(os);
                faulty.at     = at;
                faulty.moment = moment;
                faulty.crash  = []() { _exit(9); };
                server_page_files files(faulty, dir.path);
                CHECK(act(files).ok());
            });
            CHECK(code == 0 || code == 9);
            died = code == 9;

            server_page_files files(os, dir.path);
            const int found = read_generation(files);
            CHECK(died ? allowed.count(found) == 1 : found == after);

            std::vector<std::string> done;
            CHECK(files.recover(false, done).ok());
            CHECK(!has_staging(os, dir.path));
            CHECK_EQ(read_generation(files), found);
            check_next_works(os, dir.path);
        }
    }
}

server_page_files_result reading(server_page_files & files) {
    server_page_files_result res;
    read_generation(files, res);
    return res;
}

server_page_files_result recovering(server_page_files & files) {
    std::vector<std::string> done;
    return files.recover(false, done);
}

server_page_files_result removing(server_page_files & files) {
    return files.remove(NAME);
}

}

TEST(every_verb_fails_in_a_first_publication) {
    sweep_publishing(published({}), { 0 }, 2);
}

TEST(every_verb_fails_in_a_replacement_with_more_files) {
    sweep_publishing(published({ 1 }), { 1 }, 2);
}

TEST(every_verb_fails_in_a_replacement_with_fewer_files) {
    sweep_publishing(published({ 2 }), { 2 }, 3);
}

TEST(every_verb_fails_in_a_publication_that_finds_an_interrupted_one) {
    sweep_publishing(pending(2, 3, 1), { 2, 3 }, 4);
}

TEST(every_verb_fails_in_a_recovery) {
    for (const int n_moved : { 0, 1 }) {
        sweep(pending(2, 3, n_moved), recovering, [&](const server_page_files_result & res, const fault & cur, const std::string & dir) {
            CHECK(res.ok() || res.status == expected(cur.status));

            server_page_os & os = without_syncs();
            server_page_files files(os, dir);
            CHECK_EQ(read_generation(files), 3);
        });
    }
}

TEST(every_verb_fails_in_reading) {
    for (const auto & begin : { published({ 2, 3 }), pending(2, 3, 0), pending(2, 3, 1) }) {
        sweep(begin, reading, [&](const server_page_files_result & res, const fault & cur, const std::string & dir) {
            CHECK(res.ok() || res.status == expected(cur.status)); // never "there is no such page"

            server_page_os & os = without_syncs();
            server_page_files files(os, dir);
            CHECK_EQ(read_generation(files), 3);
        });
    }
}

TEST(every_verb_fails_in_a_removal) {
    for (const auto & begin : { published({ 2, 3 }), pending(2, 3, 1) }) {
        sweep(begin, removing, [&](const server_page_files_result & res, const fault & cur, const std::string & dir) {
            CHECK(res.ok() || res.status == expected(cur.status));

            server_page_os & os = without_syncs();
            server_page_files files(os, dir);
            const int found = read_generation(files);
            CHECK(found == 0 || (!res.ok() && found == 3));
        });
    }
}

TEST(every_verb_fails_in_listing) {
    sweep(pending(2, 3, 1),
        [](server_page_files & files) {
            std::vector<server_page_generation> found;
            const auto res = files.list(found);
            CHECK(!res.ok() || (found.size() == 1 && found[0].pending && found[0].name == NAME));
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
        CHECK_EQ(found[0].pending, expected[i] == SERVER_PAGE_FILES_PENDING);
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

TEST(a_process_dies_at_every_verb_of_a_publication) {
    const auto act = [](server_page_files & files) { return publish(files, 4); };
    sweep_crashes(published({}),      act, { 0, 4 },    4);
    sweep_crashes(published({ 1 }),   act, { 1, 4 },    4);
    sweep_crashes(pending(2, 3, 1),   act, { 3, 4 },    4);
}

TEST(a_process_dies_at_every_verb_of_a_publication_with_fewer_files) {
    sweep_crashes(published({ 2 }), [](server_page_files & files) { return publish(files, 3); }, { 2, 3 }, 3);
}

TEST(a_process_dies_at_every_verb_of_a_recovery_a_reading_or_a_removal) {
    sweep_crashes(pending(2, 3, 1), recovering, { 3 },    3);
    sweep_crashes(pending(2, 3, 1), reading,    { 3 },    3);
    sweep_crashes(pending(2, 3, 1), removing,   { 3, 0 }, 0);
}
