// sources: server-page-os-posix.cpp server-page-checksum.cpp

#include "server-pace.h"
#include "server-page-checksum.h"
#include "server-page-os-paced.h"

#include "testing.h"

#include <cstdlib>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

namespace {

std::vector<uint8_t> content_of(size_t n) {
    std::vector<uint8_t> res(n);
    for (size_t i = 0; i < n; ++i) {
        res[i] = uint8_t(i*2654435761u >> 13);
    }
    return res;
}

}

TEST(all_of_it_is_done_in_pieces_whose_sum_it_is) {
    for (const bool beside_decoding : { false, true }) {
        for (const size_t n : { size_t(0), size_t(1), server_pace::N_BYTES_PIECE, 3*server_pace::N_BYTES_PIECE + 7 }) {
            server_pace pace(beside_decoding);
            size_t      n_done = 0;
            CHECK(pace.in_pieces(n, [&](size_t offset, size_t n_bytes) {
                CHECK_EQ(offset, n_done);
                CHECK(n_bytes > 0 && n_bytes <= server_pace::N_BYTES_PIECE);
                n_done += n_bytes;
                return true;
            }));
            CHECK_EQ(n_done, n);
        }
    }
}

TEST(a_piece_that_fails_is_the_last) {
    server_pace pace(false);
    int         n_pieces = 0;
    CHECK(!pace.in_pieces(10*server_pace::N_BYTES_PIECE, [&](size_t, size_t) { return ++n_pieces < 3; }));
    CHECK_EQ(n_pieces, 3);
}

TEST(a_file_at_a_pace_is_the_same_file) {
    char dir[] = "/tmp/page-pace-XXXXXX";
    CHECK(mkdtemp(dir) != nullptr);

    const auto content = content_of(5*1024*1024 + 3);

    server_pace          pace(true);
    server_page_os_paced os(server_page_os_native(), pace);

    const server_page_os_path root { dir, "" };
    for (const std::string name : { "a", "b" }) {
        server_page_os_handle_ptr file;
        CHECK(os.create(root / name, file).ok());
        CHECK(os.write(root / name, *file, content.data(), content.size()).ok());
        CHECK(os.sync(root / name, *file).ok());
    }
    CHECK(os.rename(root / "a", root / "b").ok()); // in place of one that leaves memory first

    server_page_os_handle_ptr file;
    uint64_t                  n_bytes = 0;
    CHECK(os.open(root / "b", file, n_bytes).ok());
    CHECK_EQ(n_bytes, content.size());
    std::vector<uint8_t> found(n_bytes);
    CHECK(os.read(root / "b", *file, found.data(), found.size()).ok());
    CHECK(found == content);

    CHECK(os.remove(root / "b").ok());
    CHECK(rmdir(dir) == 0);
}

TEST(a_checksum_in_pieces_is_that_of_the_whole) {
    const auto content = content_of(1000003);

    server_page_checksum_state state;
    server_pace                pace(false);
    pace.in_pieces(content.size(), [&](size_t offset, size_t n_bytes) {
        state.add(content.data() + offset, n_bytes);
        return true;
    });

    CHECK_EQ(state.value(), server_page_checksum(content.data(), content.size()));
    CHECK_EQ(server_page_checksum({ { content.data(), 10 }, { content.data() + 10, content.size() - 10 } }), state.value());
    CHECK(server_page_checksum(content.data(), content.size() - 1) != state.value());
}
