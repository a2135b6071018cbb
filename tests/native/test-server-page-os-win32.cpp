// sources: server-page-files.cpp server-page-commit.cpp server-page-record.cpp server-page-file-name.cpp server-page-checksum.cpp server-page-os-win32.cpp

// Files that another program holds open, as virus scanners and indexers do.

#include "page-files-testing.h"

#include <atomic>
#include <chrono>
#include <thread>

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

namespace {

// somebody else's handle
struct held_open {
    held_open(const std::string & path, DWORD share) :
        h(CreateFileW(std::filesystem::path(path).c_str(), GENERIC_READ, share, nullptr, OPEN_EXISTING, 0, nullptr)) {}

    ~held_open() {
        if (is_open()) {
            CloseHandle(h);
        }
    }

    held_open(const held_open &) = delete;

    bool is_open() const { return h != INVALID_HANDLE_VALUE; }

    const HANDLE h;
};

const DWORD SHARES[] = { 0, FILE_SHARE_READ }; // neither lets it be replaced

// how long it took, in ms
long long timed(const std::function<void()> & run) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin).count();
}

}

TEST(a_member_that_stays_held_open_is_a_typed_error_after_a_while) {
    for (const std::string suffix : { "", ".dft" }) {
        for (const DWORD share : SHARES) {
            page_dir dir(2);
            server_page_files_result res;
            {
                const held_open held(dir / (NAME + suffix), share);
                CHECK(held.is_open());
                // one is replaced, the other one removed: generation 3 has none
                const auto t_ms = timed([&]() { res = publish(dir.files, 3); });
                CHECK(t_ms >= 900 && t_ms < 30000);
                CHECK_EQ(res.status, SERVER_PAGE_FILES_PENDING);
                CHECK(contains(res.message, dir / (NAME + suffix)));
            }
            CHECK_EQ(read_generation(dir.files), 3);
            CHECK(!has_staging(dir.os, dir.path));
        }
    }
}

TEST(a_member_that_is_held_without_sharing_is_not_read_as_missing) {
    page_dir dir(2);
    for (const std::string suffix : { "", ".dft" }) {
        server_page_files_result res;
        {
            const held_open held(dir / (NAME + suffix), 0);
            CHECK(held.is_open());
            const auto t_ms = timed([&]() { read_generation(dir.files, res); });
            CHECK(t_ms >= 900 && t_ms < 30000);
            CHECK_EQ(res.status, SERVER_PAGE_FILES_IO);
            CHECK(contains(res.message, dir / (NAME + suffix)));
        }
        CHECK_EQ(read_generation(dir.files), 2);
    }
}

// A scanner opens each new file for a moment, and again and again.
TEST(a_member_that_is_held_open_for_moments_costs_time_only) {
    page_dir dir(2);

    std::atomic<bool> ended { false };
    std::atomic<int>  n_held { 0 };
    std::thread scanner([&]() {
        for (int i = 0; !ended; ++i) {
            for (const std::string suffix : { "", ".ckpt", ".lora", ".dft" }) {
                const held_open held(dir / (NAME + suffix), SHARES[i % 2]);
                n_held += held.is_open();
                std::this_thread::yield();
            }
        }
    });
    for (int i = 0; i < 30; ++i) {
        const auto res = publish(dir.files, 3 + i);
        if (!res.ok()) {
            std::cerr << res.message << "\n";
        }
        CHECK(res.ok());
        CHECK_EQ(read_generation(dir.files), 3 + i);
    }
    ended = true;
    scanner.join();
    CHECK(n_held > 30);
    CHECK(!has_staging(dir.os, dir.path));
}
