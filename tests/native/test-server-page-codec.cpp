// sources: server-page-codec.cpp server-page-checksum.cpp

#include "server-page-codec.h"

#include "page-codec-testing.h"
#include "testing.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <random>
#include <string>
#include <tuple>

// what the heap holds for C++, and the most it held since it was last set back
static size_t n_bytes_live = 0;
static size_t n_bytes_peak = 0;

static constexpr size_t N_BYTES_BEFORE = 16; // the size, in front of what is given out; keeps the alignment

__attribute__((noinline)) void * operator new(size_t size) {
    auto * ptr = static_cast<char *>(std::malloc(size + N_BYTES_BEFORE));
    if (!ptr) {
        throw std::bad_alloc();
    }
    std::memcpy(ptr, &size, sizeof(size));
    n_bytes_live += size;
    n_bytes_peak = std::max(n_bytes_peak, n_bytes_live);
    return ptr + N_BYTES_BEFORE;
}

__attribute__((noinline)) void operator delete(void * given) noexcept {
    if (!given) {
        return;
    }
    auto * ptr = static_cast<char *>(given) - N_BYTES_BEFORE;
    size_t size;
    std::memcpy(&size, ptr, sizeof(size));
    n_bytes_live -= size;
    std::free(ptr);
}

__attribute__((noinline)) void operator delete(void * given, size_t) noexcept { operator delete(given); }

namespace {

using rng_t = std::mt19937; // its numbers are the same everywhere, those of the distributions are not

//
// both directions, and what is equal
//

bytes joined(const server_page_bytes & file) {
    CHECK_EQ(file.error, std::string());
    bytes res;
    for (const auto & part : file.parts) {
        const auto * data = static_cast<const uint8_t *>(part.data);
        res.insert(res.end(), data, data + part.size);
    }
    return res;
}

// decode out of a block of the file's exact size, so that a read past its end is found
template <typename T>
struct decoded {
    explicit decoded(const bytes & file) : data(file) {
        data.shrink_to_fit();
        result = server_page_decode(data.data(), data.size(), page);
        CHECK_EQ(result.message.empty(), result.status == SERVER_PAGE_DECODE_OK);
    }

    bytes data;
    T     page;

    server_page_decode_result result;
};

template <typename T>
server_page_decode_status status(const bytes & file) { return decoded<T>(file).result.status; }

server_page_decode_status status(const bytes & file, int kind) {
    return kind == KIND_CKPT ? status<server_page_ckpt>(file) :
           kind == KIND_LORA ? status<server_page_lora>(file) : status<server_page_draft>(file);
}

std::string content(const server_page_span & span) {
    return span.size == 0 ? "" : std::string(static_cast<const char *>(span.data), span.size);
}

server_page_span over(const std::string & text) { return { text.data(), text.size() }; }
server_page_span over(const char * text)        { return { text, std::strlen(text) }; }
server_page_span over(const bytes & data)       { return { data.data(), data.size() }; }

std::string damaged_begin(const std::string & suffix) {
    return "its first 16 bytes are damaged: the rest of its header is that of a " + suffix + " file";
}

auto tied(const server_page_checkpoint & c) {
    return std::make_tuple(c.n_tokens, c.pos_min, c.pos_max, content(c.target), content(c.draft), content(c.spec));
}

bool same(const std::vector<server_page_checkpoint> & a, const std::vector<server_page_checkpoint> & b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto & x, const auto & y) { return tied(x) == tied(y); });
}

bool same(const server_page_ckpt & a, const server_page_ckpt & b) {
    const auto same_member = [](const auto & x, const auto & y) {
        return std::tie(x.suffix, x.n_bytes, x.checksum) == std::tie(y.suffix, y.n_bytes, y.checksum);
    };
    return a.identity.fields == b.identity.fields && a.pos_max_target == b.pos_max_target && a.pos_max_draft == b.pos_max_draft &&
            a.n_lost == b.n_lost && same(a.checkpoints, b.checkpoints) &&
            std::equal(a.members.begin(), a.members.end(), b.members.begin(), b.members.end(), same_member);
}

bool is_empty(const server_page_ckpt  & page) { return same(page, server_page_ckpt()); }
bool is_empty(const server_page_lora  & page) { return page.adapters.empty(); }
bool is_empty(const server_page_draft & page) { return !page.state.data && !page.spec.data && page.state.size + page.spec.size == 0; }

template <typename T>
void every_truncation_is_torn(const bytes & file) {
    CHECK_EQ(status<T>(file), SERVER_PAGE_DECODE_OK);
    for (size_t n = 0; n < file.size(); ++n) {
        const decoded<T> cut(bytes(file.begin(), file.begin() + n));
        CHECK_EQ(cut.result.status, SERVER_PAGE_DECODE_TORN);
        CHECK(is_empty(cut.page));
    }
}

template <typename T>
void every_flip_outside_of_checkpoints_is_found(const bytes & file, size_t size) {
    for (size_t bit = 0; bit < size * 8; ++bit) {
        bytes damaged = file;
        damaged[bit / 8] ^= 1 << (bit % 8);

        const decoded<T> read(damaged);
        CHECK(is_empty(read.page));

        const size_t at = bit / 8;
        if (at >= 16 && at < 20) { // more sections than there are: the header is longer than the file, or ends elsewhere
            CHECK(read.result.status == SERVER_PAGE_DECODE_TORN || read.result.status == SERVER_PAGE_DECODE_CORRUPT);
        } else {
            CHECK_EQ(read.result.status, SERVER_PAGE_DECODE_CORRUPT);
        }
    }
}

// memory that decoding takes at most at any time: constant parts, and as much again as the file
template <typename T>
void decodes_in_bounds(const bytes & file) {
    T page;
    const size_t before = n_bytes_live;
    n_bytes_peak = before;
    server_page_decode(file.data(), file.size(), page);
    CHECK(n_bytes_peak - before <= 4 * file.size() + 64 * 1024);
}

size_t n_lost(const server_page_ckpt & page, const bytes & file) {
    CHECK_EQ(page.checkpoints.size() + page.n_lost, get(file, 16, 4) - 3);
    return page.n_lost;
}
size_t n_lost(const server_page_lora  &, const bytes &) { return 0; }
size_t n_lost(const server_page_draft &, const bytes &) { return 0; }

// what is accepted with nothing lost is exactly what would be written
template <typename T>
bool is_accepted(const bytes & file) {
    decodes_in_bounds<T>(file);

    const decoded<T> read(file);
    if (read.result.status != SERVER_PAGE_DECODE_OK) {
        CHECK(is_empty(read.page));
        return false;
    }
    CHECK_EQ(joined(server_page_encode(read.page)) == file, n_lost(read.page, file) == 0);
    return true;
}

bool is_accepted(const bytes & file, int kind) {
    return kind == KIND_CKPT ? is_accepted<server_page_ckpt>(file) :
           kind == KIND_LORA ? is_accepted<server_page_lora>(file) : is_accepted<server_page_draft>(file);
}

//
// random contents
//

std::string random_bytes(rng_t & rng, size_t n_max) {
    std::string res(rng() % (n_max + 1), '\0');
    for (auto & c : res) {
        c = char(rng());
    }
    return res;
}

std::string random_text(rng_t & rng, size_t n_max) {
    static const std::vector<std::string> PIECES = { "a", "Z", "0", " ", "~", "\"", "\\", "\u00e9", "\u6a21", "\U0001f999" };

    std::string res = "x";
    const size_t n = rng() % n_max;
    while (res.size() < n) {
        const auto & piece = PIECES[rng() % PIECES.size()];
        if (res.size() + piece.size() > n) {
            break;
        }
        res += piece;
    }
    return res;
}

uint64_t random_u64(rng_t & rng) {
    const uint64_t high = rng();
    return high << 32 | rng();
}

// one change: bytes more, fewer or others, one bit, or a number that is the least or the most of its width
void damage(bytes & file, rng_t & rng) {
    const uint64_t extremes[] = { 0, 1, 0x7f, 0xff, 0xffff, INT32_MAX, UINT32_MAX, INT64_MAX, UINT64_MAX, UINT64_MAX - 20 };

    const auto   what = rng() % 5;
    const size_t at   = rng() % (file.size() + 1);
    const size_t n    = std::min<size_t>(1 + rng() % 16, file.size() - at);

    if (what == 0 || n == 0) {
        const size_t n_more = 1 + rng() % 40;
        file.insert(file.begin() + at, n_more, uint8_t(rng()));
    } else if (what == 1) {
        file.erase(file.begin() + at, file.begin() + at + n);
    } else if (what == 2) {
        put(file, at, bytes(n, uint8_t(rng())));
    } else if (what == 3) {
        file[at] ^= 1 << (rng() % 8);
    } else {
        put(file, at, le(extremes[rng() % 10], n < 4 ? 1 : n < 8 ? 4 : 8));
    }
}

}

TEST(the_bytes_are_as_they_are_written_down) {
    // the checksum of nothing, as the algorithm's authors give it
    const std::string nothing = "\xc2\x94\xd3\x38\x05\x80\x06\x2d";

    server_page_draft page;
    auto file = joined(server_page_encode(page));
    CHECK_EQ(file.size(), 68u);
    CHECK(bytes(file.begin(), file.begin() + 60) == raw(
            std::string("\x89llpage\n" "\3\0\0\0" "\1\0\0\0" "\2\0\0\0", 20) +
            std::string("\6\0\0\0" "\0\0\0\0\0\0\0\0", 12) + nothing +
            std::string("\7\0\0\0" "\0\0\0\0\0\0\0\0", 12) + nothing));
    CHECK_EQ(get(file, 60, 8), server_page_checksum(file.data(), 60));

    page = { over("state"), over("spec") };
    CHECK(joined(server_page_encode(page)) == SMALL_DRAFT);

    server_page_lora adapters;
    adapters.adapters = { { "ab12", 1.0f }, { "cd34", -0.5f } };
    CHECK(joined(server_page_encode(adapters)) == SMALL_LORA);

    server_page_ckpt all;
    all.identity.fields = { { "model", "sha256:1f" }, { "type_k", "q8_0" } };
    all.members         = { { "", 4096, 0x1122334455667788 }, { ".dft", 77, 5 } };
    all.pos_max_target  = 41;
    all.checkpoints     = {
        { 12,  3, 11, over("target"), over("draft"), over("spec") },
        { 30,  0, 29, over("t2"), {}, {} },
        { 40, 20, 39, {}, {}, {} },
    };
    CHECK(joined(server_page_encode(all)) == SMALL_CKPT);

    const decoded<server_page_ckpt> read(SMALL_CKPT);
    CHECK(same(read.page, all));
}

TEST(random_checkpoint_files_come_back) {
    rng_t rng(1);
    for (int round = 0; round < 500; ++round) {
        server_page_ckpt page;

        const size_t n_fields = rng() % 20;
        for (size_t i = 0; i < n_fields; ++i) {
            page.identity.fields.emplace_back(std::to_string(i) + random_text(rng, 126), random_text(rng, 300));
        }
        for (const char * suffix : { ".dft", "", ".lora" }) {
            if (!*suffix || rng() % 2) {
                page.members.push_back({ suffix, random_u64(rng), random_u64(rng) });
            }
        }
        page.pos_max_target = int32_t(rng() >> 1) - (rng() % 2);
        page.pos_max_draft  = rng() % 2 ? -1 : INT32_MAX;

        std::vector<std::string> held(3 * (rng() % 6)); // what the spans point at
        for (auto & data : held) {
            data = random_bytes(rng, 600);
        }
        for (size_t i = 0; i < held.size(); i += 3) {
            const auto pos_max = int32_t(rng() >> 1);
            page.checkpoints.push_back({ int64_t(random_u64(rng) >> 1), int32_t(rng() % (uint32_t(pos_max) + 1)), pos_max,
                    over(held[i]), over(held[i + 1]), over(held[i + 2]) });
        }

        const decoded<server_page_ckpt> read(joined(server_page_encode(page)));
        CHECK_EQ(read.result.message, std::string());
        CHECK(same(read.page, page));
    }
}

TEST(random_adapters_and_drafts_come_back) {
    rng_t rng(2);
    for (int round = 0; round < 500; ++round) {
        server_page_lora adapters;
        const size_t n = rng() % 8;
        while (adapters.adapters.size() < n) {
            const uint32_t bits = rng();
            float scale;
            std::memcpy(&scale, &bits, sizeof(scale));
            if (std::isfinite(scale)) {
                adapters.adapters.emplace_back(random_text(rng, 4096), scale);
            }
        }
        const decoded<server_page_lora> read(joined(server_page_encode(adapters)));
        CHECK_EQ(read.result.message, std::string());
        CHECK(read.page.adapters == adapters.adapters);

        const auto state = random_bytes(rng, 3000);
        const auto spec  = random_bytes(rng, 500);
        const decoded<server_page_draft> draft(joined(server_page_encode(server_page_draft{ over(state), over(spec) })));
        CHECK_EQ(draft.result.message, std::string());
        CHECK_EQ(content(draft.page.state) == state, true);
        CHECK_EQ(content(draft.page.spec)  == spec,  true);
    }
}

TEST(encoding_and_decoding_copy_no_state) {
    const std::string state(size_t(32) << 20, 's');
    const std::string spec(1000, 'p');

    server_page_ckpt page;
    page.members     = { { "", 1, 2 } };
    page.checkpoints = { { 1, 0, 0, over(state), {}, over(spec) } };

    size_t before = n_bytes_peak = n_bytes_live;
    auto made = server_page_encode(page);
    const auto moved = std::move(made); // takes along what the parts point into
    CHECK(n_bytes_peak - before < 16 * 1024);

    CHECK_EQ(std::count_if(moved.parts.begin(), moved.parts.end(), [&](const auto & p) { return p.data == state.data(); }), 1);
    CHECK_EQ(std::count_if(moved.parts.begin(), moved.parts.end(), [&](const auto & p) { return p.data == spec.data(); }), 1);

    const auto file = joined(moved);
    server_page_ckpt read;
    before = n_bytes_peak = n_bytes_live;
    CHECK_EQ(server_page_decode(file.data(), file.size(), read).status, SERVER_PAGE_DECODE_OK);
    CHECK(n_bytes_peak - before < 16 * 1024);
    CHECK(read.checkpoints[0].target.data == file.data() + file.size() - state.size() - spec.size());
    CHECK_EQ(read.checkpoints[0].target.size, state.size());
}

TEST(every_truncation_is_found) {
    every_truncation_is_torn<server_page_ckpt>(SMALL_CKPT);
    every_truncation_is_torn<server_page_lora>(SMALL_LORA);
    every_truncation_is_torn<server_page_draft>(SMALL_DRAFT);
}

TEST(what_was_read_before_is_gone_when_a_file_is_not_good) {
    decoded<server_page_ckpt>  all(SMALL_CKPT);
    decoded<server_page_lora>  adapters(SMALL_LORA);
    decoded<server_page_draft> draft(SMALL_DRAFT);

    CHECK_EQ(server_page_decode(all.data.data(), all.data.size() - 1, all.page).status, SERVER_PAGE_DECODE_TORN);
    CHECK_EQ(server_page_decode(all.data.data(), all.data.size() - 1, adapters.page).status, SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(server_page_decode(all.data.data(), 1, draft.page).status, SERVER_PAGE_DECODE_TORN);

    CHECK(is_empty(all.page) && is_empty(adapters.page) && is_empty(draft.page));
}

TEST(an_empty_file_is_torn) {
    server_page_ckpt page;
    CHECK_EQ(server_page_decode(nullptr, 0, page).status, SERVER_PAGE_DECODE_TORN);
}

TEST(every_flipped_bit_is_found) {
    const size_t n_checkpoint_bytes = (40 + 15) + (40 + 2) + 40;

    every_flip_outside_of_checkpoints_is_found<server_page_ckpt>(SMALL_CKPT, SMALL_CKPT.size() - n_checkpoint_bytes);
    every_flip_outside_of_checkpoints_is_found<server_page_lora>(SMALL_LORA, SMALL_LORA.size());
    every_flip_outside_of_checkpoints_is_found<server_page_draft>(SMALL_DRAFT, SMALL_DRAFT.size());
}

TEST(a_damaged_checkpoint_is_lost_alone) {
    const size_t sizes[] = { 40 + 15, 40 + 2, 40 };
    const decoded<server_page_ckpt> good(SMALL_CKPT);

    size_t at = SMALL_CKPT.size() - sizes[0] - sizes[1] - sizes[2];
    for (int which = 0; which < 3; at += sizes[which++]) {
        auto expected = good.page;
        expected.checkpoints.erase(expected.checkpoints.begin() + which);
        expected.n_lost = 1;

        for (size_t bit = at * 8; bit < (at + sizes[which]) * 8; ++bit) {
            bytes damaged = SMALL_CKPT;
            damaged[bit / 8] ^= 1 << (bit % 8);

            const decoded<server_page_ckpt> read(damaged);
            CHECK_EQ(read.result.status, SERVER_PAGE_DECODE_OK);
            CHECK(same(read.page, expected));
        }
    }
    CHECK_EQ(at, SMALL_CKPT.size());
}

TEST(another_program_s_file_is_foreign) {
    const bytes files[] = {
        raw("ggsq"), raw("GGUF and more than enough bytes for a header"), raw("\x89llpagf"), raw(std::string(300, '\0')),
    };
    for (const auto & file : files) {
        for (const int kind : { KIND_CKPT, KIND_LORA, KIND_DRAFT }) {
            CHECK_EQ(status(file, kind), SERVER_PAGE_DECODE_FOREIGN);
        }
    }
}

TEST(another_version_is_told_from_damage) {
    for (const uint32_t version : { 0u, 2u, UINT32_MAX }) {
        bytes file = SMALL_CKPT;
        put(file, 12, u32(version));
        CHECK_EQ(decoded<server_page_ckpt>(file).result.message, damaged_begin(".ckpt"));

        bytes other = file; // whatever its header's checksum is made of
        other[30] ^= 1;
        CHECK_EQ(status(other, KIND_CKPT), SERVER_PAGE_DECODE_VERSION);

        seal_header(file);
        const decoded<server_page_ckpt> read(file);
        CHECK_EQ(read.result.status, SERVER_PAGE_DECODE_VERSION);
        CHECK_EQ(read.result.message, "the file has format version " + std::to_string(version) + ", this server reads version 1");
    }
}

TEST(a_file_whose_first_bytes_alone_are_damaged_is_ours) {
    const std::pair<bytes, std::string> files[] = { { SMALL_CKPT, ".ckpt" }, { SMALL_LORA, ".lora" }, { SMALL_DRAFT, ".dft" } };

    for (int kind = KIND_CKPT; kind <= KIND_DRAFT; ++kind) {
        const auto & [good, suffix] = files[kind - KIND_CKPT];
        const size_t n_header = 28 + get(good, 16, 4) * 20;

        const auto message = [&](const bytes & file) {
            return kind == KIND_CKPT ? decoded<server_page_ckpt>(file).result.message :
                   kind == KIND_LORA ? decoded<server_page_lora>(file).result.message : decoded<server_page_draft>(file).result.message;
        };
        std::vector<bytes> begins = { bytes(16, 0), bytes(16, 0xff), raw("GGUF"), raw("PK\x03\x04"), u64(0) + u32(kind), bytes(8, 'x') + u64(UINT64_MAX) };
        for (size_t bit = 0; bit < 128; ++bit) {
            begins.push_back(bytes(good.begin(), good.begin() + 16));
            begins.back()[bit / 8] ^= 1 << (bit % 8);
        }
        for (const auto & begin : begins) {
            bytes file = good;
            put(file, 0, begin);
            CHECK_EQ(status(file, kind), SERVER_PAGE_DECODE_CORRUPT);
            CHECK_EQ(message(file), damaged_begin(suffix));
            CHECK(server_page_is_ours(over(file)) && !server_page_is_foreign(over(file)));

            // under another one's name too, and by its header alone
            CHECK_EQ(status(file, KIND_CKPT + kind % 3), SERVER_PAGE_DECODE_CORRUPT);
            const bytes header(file.begin(), file.begin() + n_header);
            CHECK(server_page_is_ours(over(header)));

            // the magic is all that is known of less, and of a header that is damaged elsewhere too
            const bool has_magic = std::equal(file.begin(), file.begin() + 8, good.begin());
            CHECK_EQ(server_page_is_ours(over(bytes(header.begin(), header.end() - 1))), has_magic);
            CHECK_EQ(server_page_is_ours(over(bytes(header.begin(), header.begin() + 19))), has_magic);
            CHECK_EQ(server_page_is_ours({ file.data(), SERVER_PAGE_MAGIC_SIZE }), has_magic);
            for (const size_t at : { size_t(16), size_t(19), size_t(20), n_header - 1 }) {
                bytes worse = file;
                worse[at] ^= 1;
                CHECK_EQ(server_page_is_ours(over(worse)), has_magic);
            }
        }
    }
}

TEST(the_longest_header_is_known_by_its_end) {
    server_page_ckpt page;
    page.members = { { "", 1, 2 } };
    page.checkpoints.resize(65536);

    bytes file = joined(server_page_encode(page));
    file[0] ^= 1;
    CHECK_EQ(decoded<server_page_ckpt>(file).result.message, damaged_begin(".ckpt"));
    CHECK( server_page_is_ours({ file.data(), SERVER_PAGE_HEADER_SIZE_MAX }));
    CHECK(!server_page_is_ours({ file.data(), SERVER_PAGE_HEADER_SIZE_MAX - 1 }));
}

TEST(a_begin_that_is_not_there_makes_nothing_ours) {
    for (const uint32_t n : { 0u, 1u, 2u, 65539u, 65540u, 0x7fffffffu, 0xccccccccu, 0xcccccccdu, UINT32_MAX - 1, UINT32_MAX }) {
        bytes file = SMALL_DRAFT;
        put(file, 0, raw("GGUF"));
        put(file, 16, u32(n));
        for (size_t size = 0; size <= file.size(); ++size) {
            const bytes begin(file.begin(), file.begin() + size); // of the exact size, so that a read past its end is found
            CHECK_EQ(server_page_is_foreign(over(begin)), n == 2 ? size > 0 && size < 68 : size > 0);
        }
    }
}

TEST(a_file_is_foreign_where_it_does_not_go_on_as_ours_do) {
    for (size_t size = 0; size <= SMALL_LORA.size(); ++size) {
        const bytes begin(SMALL_LORA.begin(), SMALL_LORA.begin() + size);
        CHECK(!server_page_is_foreign(over(begin)));
        CHECK_EQ(server_page_is_ours(over(begin)), size >= SERVER_PAGE_MAGIC_SIZE);
    }
    for (size_t size = 1; size <= 10; ++size) {
        bytes begin(SMALL_LORA.begin(), SMALL_LORA.begin() + size);
        begin[std::min<size_t>(size, 8) - 1] ^= 1;
        CHECK(server_page_is_foreign(over(begin)) && !server_page_is_ours(over(begin)));
    }
    CHECK(!server_page_is_foreign({ nullptr, 0 }) && !server_page_is_ours({ nullptr, 0 }));
}

TEST(a_file_under_another_one_s_name_is_corrupt) {
    CHECK_EQ(status(SMALL_LORA,  KIND_CKPT),  SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(SMALL_DRAFT, KIND_LORA),  SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(SMALL_CKPT,  KIND_DRAFT), SERVER_PAGE_DECODE_CORRUPT);

    // and so is one that has the right sections and says it is of another kind
    for (const uint32_t kind : { 0u, 1u, 3u, 4u, UINT32_MAX }) {
        CHECK_EQ(status(container(kind, { { ID_ADAPTERS, u32(0) } }), KIND_LORA), SERVER_PAGE_DECODE_CORRUPT);
    }
}

TEST(sections_are_those_of_the_kind_once_and_in_order) {
    const section identity = { ID_IDENTITY, IDENTITY }, members = { ID_MEMBERS, MEMBERS }, positions = { ID_POSITIONS, POSITIONS };
    const section one = { ID_CHECKPOINT, checkpoint(1, 0, 0) };

    CHECK_EQ(status(container(KIND_CKPT, { identity, members, positions, one, one }), KIND_CKPT), SERVER_PAGE_DECODE_OK);

    const std::vector<std::vector<section>> wrong = {
        {},
        { identity },
        { identity, members },
        { identity, members, one },
        { identity, positions, one },
        { members, identity, positions },
        { identity, members, one, positions },
        { identity, identity, members, positions },
        { identity, members, positions, positions },
        { identity, members, positions, identity },
        { identity, members, positions, { ID_ADAPTERS, one.data } },
        { identity, members, positions, { 0, one.data } },
        { identity, members, positions, { 8, one.data } },
        { identity, members, positions, one, { UINT32_MAX, one.data } },
    };
    for (const auto & sections : wrong) {
        CHECK_EQ(status(container(KIND_CKPT, sections), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
    }

    const section adapters = { ID_ADAPTERS, u32(0) }, state = { ID_STATE, {} }, spec = { ID_SPEC, {} };
    CHECK_EQ(status(container(KIND_LORA,  { adapters }),              KIND_LORA),  SERVER_PAGE_DECODE_OK);
    CHECK_EQ(status(container(KIND_LORA,  { adapters, adapters }),    KIND_LORA),  SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(container(KIND_LORA,  { adapters, one }),         KIND_LORA),  SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(container(KIND_DRAFT, { state }),                 KIND_DRAFT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(container(KIND_DRAFT, { spec, state }),           KIND_DRAFT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(container(KIND_DRAFT, { state, spec, one }),      KIND_DRAFT), SERVER_PAGE_DECODE_CORRUPT);
}

TEST(bytes_after_the_last_section_are_corrupt) {
    CHECK_EQ(status(SMALL_CKPT  + raw("x"), KIND_CKPT),  SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(SMALL_LORA  + raw("x"), KIND_LORA),  SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(SMALL_DRAFT + SMALL_DRAFT, KIND_DRAFT), SERVER_PAGE_DECODE_CORRUPT);
}

TEST(bytes_after_a_section_s_content_are_corrupt) {
    CHECK_EQ(status(ckpt({}, IDENTITY + raw("x")), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(ckpt({}, IDENTITY, MEMBERS + raw("x")), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(ckpt({}, IDENTITY, MEMBERS, POSITIONS + raw("x")), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(ckpt({ checkpoint(1, 0, 0) + raw("x") }), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(lora(u32(0) + raw("x")), KIND_LORA), SERVER_PAGE_DECODE_CORRUPT);
}

TEST(sizes_that_wrap_around_are_torn_however_well_they_are_sealed) {
    const uint64_t sizes[] = {
        UINT64_MAX, UINT64_MAX - 1, UINT64_MAX - 7, UINT64_MAX - 8, UINT64_MAX - 67, uint64_t(1) << 63, uint64_t(1) << 32,
    };

    // the first section far too large, and the second such that the sum of both is right after it wrapped
    for (const uint64_t size : sizes) {
        bytes file = SMALL_DRAFT;
        put(file, 24, u64(size));
        put(file, 44, u64(9 - size));
        seal_header(file);
        CHECK_EQ(status(file, KIND_DRAFT), SERVER_PAGE_DECODE_TORN);
        decodes_in_bounds<server_page_draft>(file);

        file = SMALL_DRAFT;
        put(file, 44, u64(size));
        seal_header(file);
        CHECK_EQ(status(file, KIND_DRAFT), SERVER_PAGE_DECODE_TORN);
    }
    bytes file = SMALL_DRAFT;
    put(file, 44, u64(5)); // one more than there is
    seal_header(file);
    CHECK_EQ(status(file, KIND_DRAFT), SERVER_PAGE_DECODE_TORN);

    // the same inside of a checkpoint that is whole: three sizes of which the sum wraps around to what is there
    for (const uint64_t size : sizes) {
        bytes parts = checkpoint(1, 0, 0, "target", "draft", "spec");
        put(parts, 16, u64(size));
        put(parts, 24, u64(15 - size));
        put(parts, 32, u64(0));
        CHECK_EQ(status(ckpt({ parts }), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
        decodes_in_bounds<server_page_ckpt>(ckpt({ parts }));
    }
}

TEST(giant_counts_take_no_memory) {
    for (const uint32_t n : { 4u, 257u, 1025u, 65540u, 0x7fffffffu, 0x80000000u, 0xccccccccu, 0xcccccccdu, UINT32_MAX }) {
        // of sections: 20 bytes each, and 0xcccccccd of them wrap around where they are counted in 32 bits
        bytes file = SMALL_DRAFT;
        put(file, 16, u32(n));
        seal_header(file);
        CHECK_EQ(status(file, KIND_DRAFT), SERVER_PAGE_DECODE_TORN);
        decodes_in_bounds<server_page_draft>(file);

        // of what is inside of a section, and of a text's bytes
        for (const auto & wrong : {
                ckpt({}, u32(n) + text("a") + text("b")),
                ckpt({}, u32(1) + u32(n) + raw("a") + text("b")),
                ckpt({}, u32(1) + text("a") + u32(n) + raw("b")),
                ckpt({}, IDENTITY, u32(n) + text("") + u64(1) + u64(1)),
                ckpt({}, IDENTITY, u32(1) + u32(n) + u64(1) + u64(1)) }) {
            CHECK_EQ(status(wrong, KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
            decodes_in_bounds<server_page_ckpt>(wrong);
        }
        for (const auto & wrong : { lora(u32(n) + text("a") + u32(0)), lora(u32(1) + u32(n) + raw("a") + u32(0)) }) {
            CHECK_EQ(status(wrong, KIND_LORA), SERVER_PAGE_DECODE_CORRUPT);
            decodes_in_bounds<server_page_lora>(wrong);
        }
    }
}

TEST(counts_and_texts_have_a_most_in_both_directions) {
    const auto fields = [](size_t n) {
        bytes res = u32(n);
        for (size_t i = 0; i < n; ++i) {
            res = res + text(std::to_string(i)) + text("v");
        }
        return res;
    };
    const auto adapters = [](size_t n) {
        bytes res = u32(n);
        for (size_t i = 0; i < n; ++i) {
            res = res + text("same") + u32(0);
        }
        return res;
    };
    CHECK_EQ(status(ckpt({}, fields(256)), KIND_CKPT), SERVER_PAGE_DECODE_OK);
    CHECK_EQ(status(ckpt({}, fields(257)), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
    CHECK_EQ(status(lora(adapters(1024)), KIND_LORA), SERVER_PAGE_DECODE_OK);
    CHECK_EQ(status(lora(adapters(1025)), KIND_LORA), SERVER_PAGE_DECODE_CORRUPT);
    decodes_in_bounds<server_page_ckpt>(ckpt({}, fields(256)));
    decodes_in_bounds<server_page_lora>(lora(adapters(1024)));

    for (const bool over : { false, true }) {
        const auto expected = over ? SERVER_PAGE_DECODE_CORRUPT : SERVER_PAGE_DECODE_OK;
        const std::string name(128 + over, 'n'), value(4096 + over, 'v');

        CHECK_EQ(status(ckpt({}, u32(1) + text(name) + text("v")), KIND_CKPT), expected);
        CHECK_EQ(status(ckpt({}, u32(1) + text("n") + text(value)), KIND_CKPT), expected);
        CHECK_EQ(status(lora(u32(1) + text(value) + u32(0)), KIND_LORA), expected);

        server_page_ckpt page;
        page.members = { { "", 1, 2 } };
        page.identity.fields = { { name, "v" } };
        CHECK_EQ(server_page_encode(page).error.empty(), !over);
        page.identity.fields = { { "n", value } };
        CHECK_EQ(server_page_encode(page).error.empty(), !over);
        page.identity.fields.clear();
        page.checkpoints.resize(65536 + over);
        CHECK_EQ(server_page_encode(page).error.empty(), !over);
        page.checkpoints.clear();
        for (size_t i = 0; i < 256u + over; ++i) {
            page.identity.fields.emplace_back(std::to_string(i), "v");
        }
        CHECK_EQ(server_page_encode(page).error.empty(), !over);

        server_page_lora some;
        some.adapters.assign(1024 + over, { "a", 1.0f });
        CHECK_EQ(server_page_encode(some).error.empty(), !over);
        some.adapters = { { value, 1.0f } };
        CHECK_EQ(server_page_encode(some).error.empty(), !over);
    }
}

TEST(the_most_checkpoints_are_read_in_bounds) {
    server_page_ckpt page;
    page.members = { { "", 1, 2 } };
    page.checkpoints.resize(65536);

    bytes file = joined(server_page_encode(page));
    CHECK_EQ(decoded<server_page_ckpt>(file).page.checkpoints.size(), 65536u);
    decodes_in_bounds<server_page_ckpt>(file);

    // one more, which the encoder would not write
    file.insert(file.begin() + 20 + (3 + 65536) * 20, 20, 0);
    put(file, 20 + (3 + 65536) * 20, u32(ID_CHECKPOINT));
    put(file, 16, u32(3 + 65537));
    seal(file);
    CHECK_EQ(status(file, KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);
}

TEST(texts_are_printable_in_both_directions) {
    const std::vector<std::string> good = { "a", " ~", "\"\\'<>", "\u00a0\u00e9", "\u6a21", "\U0001f999", "\ud7ff\ue000", "\U0010ffff" };
    const std::vector<std::string> bad  = {
        "", std::string(1, '\0'), "a\nb", "\r", "\t", "\x1b[2J", "\x7f", // none, and controls
        "\u0080", "\u0085", "\u009b", "\u009f",                           // controls of eight bits
        "\u2028", "\u2029", "\u202e", "\u202a", "\u2066", "\u2069", "\u200e", "\u200f",                     // lines, directions
        "\x80", "\xbf", "\xff", "\xfe",                                                                  // no first bytes
        "\xc0\x80", "\xc1\x81", "\xe0\x80\x80", "\xe0\x9f\xbf", "\xf0\x80\x80\x80", "\xf0\x8f\xbf\xbf", // overlong
        "\xed\xa0\x80", "\xed\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xf8\x88\x80\x80\x80", // no characters
        "\xc3", "\xe6\xa8", "\xf0\x9f\xa6", "a\xc3" "a", "\xe6\xa8" "a", "\xf0\x9f\xa6" "a",            // cut off
        "\xc3\xc0", "\xc3\xff", "\xe6\xa8\xc3\xa9", "\xf0\x9f\xa6\xe6\xa8\xa1",                         // by another character
    };

    for (const auto * texts : { &good, &bad }) {
        const bool is_good  = texts == &good;
        const auto expected = is_good ? SERVER_PAGE_DECODE_OK : SERVER_PAGE_DECODE_CORRUPT;

        for (const auto & t : *texts) {
            CHECK_EQ(status(ckpt({}, u32(1) + text(t) + text("v")), KIND_CKPT), expected);
            CHECK_EQ(status(ckpt({}, u32(1) + text("n") + text(t)), KIND_CKPT), expected);
            CHECK_EQ(status(lora(u32(1) + text(t) + u32(0)), KIND_LORA), expected);

            server_page_ckpt page;
            page.members = { { "", 1, 2 } };
            page.identity.fields = { { "first", "v" }, { t, "v" } };
            CHECK_EQ(server_page_encode(page).error.empty(), is_good);
            page.identity.fields = { { "first", t } };
            CHECK_EQ(server_page_encode(page).error.empty(), is_good);

            server_page_lora adapters;
            adapters.adapters = { { t, 1.0f } };
            CHECK_EQ(server_page_encode(adapters).error.empty(), is_good);
        }
    }
}

TEST(messages_repeat_nothing_unprintable) {
    const decoded<server_page_ckpt> read(ckpt({}, u32(1) + text("a\x1b]0;") + text("v")));
    CHECK_EQ(read.result.message, std::string("section 1 (identity): the name of field 1 of the identity is not printable UTF-8"));

    const decoded<server_page_ckpt> members(ckpt({}, IDENTITY, u32(2) + text("") + u64(1) + u64(1) + text("\x1b") + u64(1) + u64(1)));
    CHECK_EQ(members.result.message,
            std::string("section 2 (members): a member is neither the page's own file nor its .lora nor its .dft"));
}

TEST(a_field_is_there_once) {
    const bytes twice = u32(3) + text("a") + text("1") + text("b") + text("1") + text("a") + text("2");
    CHECK_EQ(status(ckpt({}, twice), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);

    server_page_ckpt page;
    page.members = { { "", 1, 2 } };
    page.identity.fields = { { "a", "1" }, { "b", "1" }, { "a", "1" } };
    CHECK_EQ(server_page_encode(page).error, std::string("the field 'a' is there twice"));
    CHECK_EQ(server_page_encode(page).parts.size(), 0u);
}

TEST(members_are_the_known_ones_once_and_the_file_itself_always) {
    const std::vector<std::pair<std::vector<std::string>, bool>> cases = {
        { { "" }, true }, { { "", ".lora", ".dft" }, true }, { { ".dft", "" }, true },
        { {}, false }, { { ".lora" }, false }, { { ".lora", ".dft" }, false },
        { { "", "" }, false }, { { "", ".dft", ".dft" }, false }, { { "", ".lora", ".dft", ".lora" }, false },
        { { "", ".ckpt" }, false }, { { "", "dft" }, false }, { { "", "/../x" }, false }, { { "", ".DFT" }, false },
    };
    for (const auto & [suffixes, is_good] : cases) {
        server_page_ckpt page;
        bytes members = u32(suffixes.size());
        for (const auto & suffix : suffixes) {
            members = members + text(suffix) + u64(1) + u64(2);
            page.members.push_back({ suffix, 1, 2 });
        }
        CHECK_EQ(status(ckpt({}, IDENTITY, members), KIND_CKPT), is_good ? SERVER_PAGE_DECODE_OK : SERVER_PAGE_DECODE_CORRUPT);
        CHECK_EQ(server_page_encode(page).error.empty(), is_good);
    }
}

TEST(positions_and_tokens_are_possible_ones) {
    const std::vector<std::tuple<int64_t, int32_t, int32_t, bool>> cases = {
        { 0, 0, 0, true }, { INT64_MAX, INT32_MAX, INT32_MAX, true }, { 5, 0, INT32_MAX, true },
        { -1, 0, 0, false }, { INT64_MIN, 0, 0, false }, { 1, 1, 0, false }, { 1, -1, 0, false }, { 1, -1, -1, false },
        { 1, 0, -1, false }, { 1, INT32_MIN, INT32_MAX, false }, { 1, INT32_MAX, INT32_MIN, false },
    };
    for (const auto & [n_tokens, pos_min, pos_max, is_good] : cases) {
        // a checkpoint that is whole and says the impossible takes the file with it: nothing was lost on the way
        const auto file = ckpt({ checkpoint(1, 0, 0), checkpoint(n_tokens, pos_min, pos_max) });
        CHECK_EQ(status(file, KIND_CKPT), is_good ? SERVER_PAGE_DECODE_OK : SERVER_PAGE_DECODE_CORRUPT);

        server_page_ckpt page;
        page.members     = { { "", 1, 2 } };
        page.checkpoints = { { 1, 0, 0, {}, {}, {} }, { n_tokens, pos_min, pos_max, {}, {}, {} } };
        CHECK_EQ(server_page_encode(page).error.empty(), is_good);
    }
    CHECK_EQ(status(ckpt({ bytes(39) }), KIND_CKPT), SERVER_PAGE_DECODE_CORRUPT);

    for (const int32_t pos : { -1, 0, INT32_MAX, -2, INT32_MIN }) {
        for (const bool is_target : { false, true }) {
            const auto positions = is_target ? u32(uint32_t(pos)) + u32(3) : u32(3) + u32(uint32_t(pos));
            const auto expected  = pos >= -1 ? SERVER_PAGE_DECODE_OK : SERVER_PAGE_DECODE_CORRUPT;
            CHECK_EQ(status(ckpt({}, IDENTITY, MEMBERS, positions), KIND_CKPT), expected);

            server_page_ckpt page;
            page.members = { { "", 1, 2 } };
            (is_target ? page.pos_max_target : page.pos_max_draft) = pos;
            CHECK_EQ(server_page_encode(page).error.empty(), pos >= -1);
        }
    }
}

TEST(scales_are_finite) {
    for (const uint32_t bits : { 0u, 0x80000000u, 1u, 0x7f7fffffu, 0xff7fffffu }) {
        CHECK_EQ(status(lora(u32(1) + text("a") + u32(bits)), KIND_LORA), SERVER_PAGE_DECODE_OK);
    }
    for (const uint32_t bits : { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, UINT32_MAX }) {
        CHECK_EQ(status(lora(u32(1) + text("a") + u32(bits)), KIND_LORA), SERVER_PAGE_DECODE_CORRUPT);
    }
    for (const float scale : { std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN() }) {
        server_page_lora page;
        page.adapters = { { "a", 1.0f }, { "b", scale } };
        CHECK_EQ(server_page_encode(page).error, std::string("the scale of adapter 2 is no finite number"));
        CHECK_EQ(server_page_encode(page).parts.size(), 0u);
    }
}

TEST(a_comparison_names_every_field_that_differs) {
    const server_page_identity page   = { { { "model", "a" }, { "type_k", "f16" }, { "lora", "x" }, { "rope", "1" } } };
    const server_page_identity server = { { { "swa", "on" }, { "rope", "1" }, { "type_k", "q8_0" }, { "model", "a" }, { "flash", "on" } } };

    std::string found;
    for (const auto & d : server_page_compare(page, server)) {
        found += d.field + ":" + d.page + ":" + d.server + " ";
    }
    CHECK_EQ(found, std::string("type_k:f16:q8_0 lora:x: swa::on flash::on "));

    const server_page_identity reversed = { { page.fields.rbegin(), page.fields.rend() } };
    CHECK(server_page_compare(page, reversed).empty());
    CHECK(server_page_compare({}, {}).empty());
    CHECK_EQ(server_page_compare(page, {}).size(), 4u);
}

TEST(random_damage_is_never_read_as_if_good) {
    const bytes * files[] = { &SMALL_CKPT, &SMALL_LORA, &SMALL_DRAFT };

    rng_t rng(3);
    int n_accepted = 0;
    for (int round = 0; round < 20000; ++round) {
        const int kind = KIND_CKPT + rng() % 3;
        bytes file = *files[kind - KIND_CKPT];

        for (int n_steps = 1 + rng() % 4; n_steps > 0; --n_steps) {
            damage(file, rng);
        }
        const bool is_sealed = rng() % 2;
        if (is_sealed) {
            seal(file);
        }

        const bool accepted = is_accepted(file, kind);
        n_accepted += accepted && is_sealed;

        // without a right checksum there is only what was not changed after all, or a checkpoint that was lost
        if (accepted && !is_sealed && file != *files[kind - KIND_CKPT]) {
            CHECK_EQ(kind, int(KIND_CKPT));
            CHECK(decoded<server_page_ckpt>(file).page.n_lost > 0);
        }
    }
    CHECK(n_accepted > 500); // the rounds reach what lies behind the checksums
}
