// Files of a page by hand: the format as it is written down, and not as the codec makes it.

#pragma once

#include "server-page-checksum.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

using bytes = std::vector<uint8_t>;

enum { KIND_CKPT = 1, KIND_LORA = 2, KIND_DRAFT = 3 };

enum { ID_IDENTITY = 1, ID_MEMBERS = 2, ID_POSITIONS = 3, ID_CHECKPOINT = 4, ID_ADAPTERS = 5, ID_STATE = 6, ID_SPEC = 7 };

inline bytes le(uint64_t value, int n) {
    bytes res;
    for (int i = 0; i < n; ++i) {
        res.push_back(uint8_t(value >> (8 * i)));
    }
    return res;
}

inline bytes u32(uint64_t value) { return le(value, 4); }
inline bytes u64(uint64_t value) { return le(value, 8); }

inline bytes operator+(bytes a, const bytes & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

inline bytes raw(const std::string & text) { return bytes(text.begin(), text.end()); }

inline bytes text(const std::string & value) { return u32(value.size()) + raw(value); }

inline void put(bytes & file, size_t at, const bytes & what) { std::copy(what.begin(), what.end(), file.begin() + at); }

inline uint64_t get(const bytes & file, size_t at, int n) {
    uint64_t res = 0;
    for (int i = n; i-- > 0;) {
        res = res << 8 | file[at + i];
    }
    return res;
}

// the header's checksum over what the header now says, as somebody with bad intent would leave it
inline void seal_header(bytes & file) {
    const uint64_t n = file.size() >= 20 ? get(file, 16, 4) * 20 + 20 : UINT64_MAX - 8;
    if (n + 8 <= file.size()) {
        put(file, n, u64(server_page_checksum(file.data(), n)));
    }
}

// the same for every section that is inside of the file
inline void seal(bytes & file) {
    const uint64_t n = file.size() >= 20 ? get(file, 16, 4) : UINT32_MAX;
    uint64_t at = n * 20 + 28;
    for (uint64_t i = 0; i < n && at <= file.size(); ++i) {
        const uint64_t size = get(file, 20 + i * 20 + 4, 8);
        if (size > file.size() - at) {
            break;
        }
        put(file, 20 + i * 20 + 12, u64(server_page_checksum(file.data() + at, size)));
        at += size;
    }
    seal_header(file);
}

struct section {
    uint32_t id;
    bytes    data;
};

inline bytes container(uint32_t kind, const std::vector<section> & sections) {
    bytes res = raw("\x89llpage\n") + u32(kind) + u32(1) + u32(sections.size());
    for (const auto & section : sections) {
        res = res + u32(section.id) + u64(section.data.size()) + u64(0);
    }
    res = res + u64(0);
    for (const auto & section : sections) {
        res = res + section.data;
    }
    seal(res);
    return res;
}

inline bytes checkpoint(int64_t n_tokens, int32_t pos_min, int32_t pos_max, const std::string & target = "",
        const std::string & draft = "", const std::string & spec = "") {
    return u64(n_tokens) + u32(uint32_t(pos_min)) + u32(uint32_t(pos_max)) + u64(target.size()) + u64(draft.size()) + u64(spec.size()) +
            raw(target) + raw(draft) + raw(spec);
}

static const bytes IDENTITY  = u32(2) + text("model") + text("sha256:1f") + text("type_k") + text("q8_0");
static const bytes MEMBERS   = u32(2) + text("") + u64(4096) + u64(0x1122334455667788) + text(".dft") + u64(77) + u64(5);
static const bytes POSITIONS = u32(41) + u32(uint32_t(-1));

inline bytes ckpt(const std::vector<bytes> & checkpoints, const bytes & identity = IDENTITY, const bytes & members = MEMBERS,
        const bytes & positions = POSITIONS) {
    std::vector<section> sections = { { ID_IDENTITY, identity }, { ID_MEMBERS, members }, { ID_POSITIONS, positions } };
    for (const auto & checkpoint : checkpoints) {
        sections.push_back({ ID_CHECKPOINT, checkpoint });
    }
    return container(KIND_CKPT, sections);
}

inline bytes lora(const bytes & adapters) { return container(KIND_LORA, { { ID_ADAPTERS, adapters } }); }

inline bytes draft(const std::string & state, const std::string & spec) {
    return container(KIND_DRAFT, { { ID_STATE, raw(state) }, { ID_SPEC, raw(spec) } });
}

static const bytes SMALL_CKPT  = ckpt({ checkpoint(12, 3, 11, "target", "draft", "spec"), checkpoint(30, 0, 29, "t2"), checkpoint(40, 20, 39) });
static const bytes SMALL_LORA  = lora(u32(2) + text("ab12") + u32(0x3f800000) + text("cd34") + u32(0xbf000000)); // scales 1 and -0.5
static const bytes SMALL_DRAFT = draft("state", "spec");
