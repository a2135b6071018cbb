// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-*.cpp

// Each verb fails once: the part of the sweeps that is short enough for every operating system.

#include "page-files-sweeps.h"

namespace {

const std::vector<fault> ONCE = { { SERVER_PAGE_OS_OTHER, FAULT_BEFORE, false } };

}

TEST(every_verb_fails_once_in_a_replacement_with_fewer_files) {
    sweep_publishing(ONCE, published({ 2 }), { 2 }, 3);
}

TEST(every_verb_fails_once_in_a_recovery) {
    sweep(ONCE, pending(2, 3, 1), recovering, [](const server_page_files_result & res, const fault & cur, const std::string & dir) {
        CHECK(res.ok() || res.status == expected(cur.status));

        server_page_files files(without_syncs(), dir);
        CHECK_EQ(read_generation(files), 3);
    });
}
