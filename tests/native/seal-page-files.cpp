// sources: server-page-checksum.cpp

// Makes the checksums and sizes of a page's files right, whatever is in them: DIR NAME. As somebody with bad intent would
// leave them, so that what is wrong is found behind the checksums or not at all.

#include "page-codec-testing.h"

#include <fstream>
#include <iterator>

static bytes read_file(const std::string & path) {
    std::ifstream file(path, std::ios::binary);
    return bytes(std::istreambuf_iterator<char>(file), {});
}

static void write_file(const std::string & path, const bytes & content) {
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char *>(content.data()), content.size());
}

// what a member says of its file; left alone from where it cannot be read any more
static void seal_members(bytes & ckpt, const std::string & file) {
    if (ckpt.size() < 68 || get(ckpt, 16, 4) < 2) {
        return;
    }
    const uint64_t n_header = 28 + get(ckpt, 16, 4) * 20;
    const uint64_t n_before = get(ckpt, 24, 8); // the identity

    uint64_t at = n_header + n_before;
    if (n_header > ckpt.size() || n_before > ckpt.size() - n_header || ckpt.size() - at < 4) {
        return;
    }
    const uint64_t n_members = get(ckpt, at, 4);
    at += 4;
    for (uint64_t i = 0; i < n_members && ckpt.size() - at >= 4; ++i) {
        const uint64_t n_suffix = get(ckpt, at, 4);
        if (ckpt.size() - at < 20 || n_suffix > ckpt.size() - at - 20) {
            return;
        }
        const std::string suffix(ckpt.begin() + at + 4, ckpt.begin() + at + 4 + n_suffix);
        at += 4 + n_suffix;

        const auto member = read_file(file + suffix);
        put(ckpt, at, u64(member.size()) + u64(server_page_checksum(member.data(), member.size())));
        at += 16;
    }
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    const std::string file = std::string(argv[1]) + "/" + argv[2];

    // .ckpt is the last: it has the checksums of the others
    for (const std::string suffix : { ".lora", ".dft", ".ckpt" }) {
        auto content = read_file(file + suffix);
        if (content.empty()) { // or not there
            continue;
        }
        if (suffix == ".ckpt") {
            seal_members(content, file);
        }
        seal(content);
        write_file(file + suffix, content);
    }
    return 0;
}
