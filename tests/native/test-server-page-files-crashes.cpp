// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-posix.cpp

// Each verb of the native file system takes the process with it.

#include "page-files-fork.h"
#include "page-files-sweeps.h"

#include <set>

namespace {

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
            CHECK(files.recover(NAME, false, done).ok());
            CHECK(!has_staging(os, dir.path));
            CHECK_EQ(read_generation(files), found);
            check_next_works(os, dir.path);
        }
    }
}

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

TEST(a_process_dies_at_every_verb_of_a_recovery_or_a_reading) {
    sweep_crashes(pending(2, 3, 1), recovering, { 3 },    3);
    sweep_crashes(pending(2, 3, 1), reading,    { 3 },    3);
}
