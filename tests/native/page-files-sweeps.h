// The verbs of the native file system fail one after another: where that begins, what is done, and what must work after it.

#pragma once

#include "page-files-testing.h"

#include <set>

// nobody can tell here what is durable, and to make it so takes long
inline server_page_os & without_syncs() {
    static faulty_os res(server_page_os_native(), true);
    return res;
}

// what the directory holds before the fault
typedef std::function<void(server_page_os & os, const std::string & dir)> start;

inline start published(std::vector<int> generations) {
    return [=](server_page_os & os, const std::string & dir) {
        server_page_files files(os, dir);
        for (const int generation : generations) {
            CHECK(publish(files, generation).ok());
        }
    };
}

inline start pending(int old, int next, int n_moved) {
    return [=](server_page_os & os, const std::string & dir) {
        published({ old })(os, dir);
        leave_pending(os, dir, next, n_moved);
    };
}

inline void check_next_works(server_page_os & os, const std::string & dir) {
    server_page_files files(os, dir);
    for (const int next : { 8, 9 }) {
        CHECK(publish(files, next).ok());
        CHECK_EQ(read_generation(files), next);
        CHECK(!has_staging(os, dir));
    }
}

inline server_page_files_result reading(server_page_files & files) {
    server_page_files_result res;
    read_generation(files, res);
    return res;
}

inline server_page_files_result recovering(server_page_files & files) {
    std::vector<std::string> done;
    return files.recover(NAME, false, done);
}

struct fault {
    server_page_os_status status;
    fault_moment          moment;
    bool                  from_then_on;
};

inline server_page_files_status expected(server_page_os_status status) {
    return status == SERVER_PAGE_OS_NO_SPACE ? SERVER_PAGE_FILES_NO_SPACE
        : status == SERVER_PAGE_OS_NO_ACCESS ? SERVER_PAGE_FILES_NO_ACCESS : SERVER_PAGE_FILES_IO;
}

// `act` is run with each of its verbs failing in each way, `check` sees what it returned and what came of it
inline void sweep(const std::vector<fault> & faults, const start & begin,
        const std::function<server_page_files_result(server_page_files & files)> & act,
        const std::function<void(const server_page_files_result & res, const fault & cur, const std::string & dir)> & check) {
    const temporary_dir dir;
    server_page_os & os = without_syncs();

    for (const auto & cur : faults) {
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

inline void sweep_publishing(const std::vector<fault> & faults, const start & begin, const std::set<int> & old, int generation) {
    sweep(faults, begin, [&](server_page_files & files) { return publish(files, generation); },
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
