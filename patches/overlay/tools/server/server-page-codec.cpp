#include "server-page-codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// not text, and one line break: a transfer that takes it for text is seen in the first bytes
static constexpr uint8_t MAGIC[SERVER_PAGE_MAGIC_SIZE] = { 0x89, 'l', 'l', 'p', 'a', 'g', 'e', '\n' };

static constexpr size_t N_BYTES_BEGIN   = 16; // magic, kind, version
static constexpr size_t N_BYTES_FIXED   = 20; // and the number of sections
static constexpr size_t N_BYTES_SECTION = 20; // id, size, checksum

// what memory a file can make its reader take is bounded by these as well as by its size
static constexpr size_t N_FIELDS_MAX      = 256;
static constexpr size_t N_ADAPTERS_MAX    = 1024;
static constexpr size_t N_CHECKPOINTS_MAX = 65536;
static constexpr size_t N_BYTES_NAME_MAX  = 128;
static constexpr size_t N_BYTES_VALUE_MAX = 4096;

// the files of a page beside .ckpt by suffix, the first is FILE itself
static const std::vector<std::string> MEMBERS = { "", ".lora", ".dft" };

enum section_id : uint32_t {
    SECTION_IDENTITY   = 1,
    SECTION_MEMBERS    = 2,
    SECTION_POSITIONS  = 3,
    SECTION_CHECKPOINT = 4,
    SECTION_ADAPTERS   = 5,
    SECTION_STATE      = 6,
    SECTION_SPEC       = 7,
};

static const char * section_name(uint32_t id) {
    switch (id) {
        case SECTION_IDENTITY:   return "identity";
        case SECTION_MEMBERS:    return "members";
        case SECTION_POSITIONS:  return "positions";
        case SECTION_CHECKPOINT: return "checkpoint";
        case SECTION_ADAPTERS:   return "adapters";
        case SECTION_STATE:      return "state";
        case SECTION_SPEC:       return "spec";
        default:                 return "unknown";
    }
}

// which sections a file of a kind has: some once and in order, then any number of checkpoints where the kind has them
struct codec_layout {
    uint32_t kind;
    const char * suffix;
    std::vector<uint32_t> once;
    size_t n_checkpoints_max;
};

static const codec_layout LAYOUT_CKPT  = { 1, ".ckpt", { SECTION_IDENTITY, SECTION_MEMBERS, SECTION_POSITIONS }, N_CHECKPOINTS_MAX };
static const codec_layout LAYOUT_LORA  = { 2, ".lora", { SECTION_ADAPTERS }, 0 };
static const codec_layout LAYOUT_DRAFT = { 3, ".dft", { SECTION_STATE, SECTION_SPEC }, 0 };

// without its checksum; of any number of sections, for it may come out of a file
static constexpr uint64_t header_size(uint32_t n_sections) {
    return N_BYTES_FIXED + uint64_t(n_sections) * N_BYTES_SECTION;
}

static_assert(header_size(3 + N_CHECKPOINTS_MAX) + sizeof(uint64_t) == SERVER_PAGE_HEADER_SIZE_MAX, "the .ckpt has the longest header");

//
// what the format allows: one set of rules for both directions, empty: nothing is wrong
//

// no control characters, no line separators, and nothing that turns the direction of what is beside it in a log
static bool is_printable(const std::string & text) {
    for (size_t i = 0; i < text.size();) {
        const uint8_t first = text[i];

        const size_t n = first < 0x80 ? 1 : first >= 0xc2 && first <= 0xdf ? 2 : (first & 0xf0) == 0xe0 ? 3 :
                first >= 0xf0 && first <= 0xf4 ? 4 : 0;
        if (n == 0 || n > text.size() - i) {
            return false;
        }

        uint32_t code = n == 1 ? first : first & (0x7f >> n);
        for (size_t k = 1; k < n; k++) {
            const uint8_t next = text[i + k];
            if ((next & 0xc0) != 0x80) {
                return false;
            }
            code = code << 6 | (next & 0x3f);
        }
        i += n;

        const bool overlong = (n == 3 && code < 0x800) || (n == 4 && code < 0x10000);
        const bool no_char  = (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff;
        const bool control  = code < 0x20 || (code >= 0x7f && code <= 0x9f);
        const bool lines    = code == 0x2028 || code == 0x2029;
        const bool turns    = code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
        if (overlong || no_char || control || lines || turns) {
            return false;
        }
    }
    return true;
}

static std::string text_error(const std::string & what, const std::string & text, size_t n_bytes_max) {
    if (text.empty()) {
        return what + " is empty";
    }
    if (text.size() > n_bytes_max) {
        return what + " has " + std::to_string(text.size()) + " bytes, the most is " + std::to_string(n_bytes_max);
    }
    return is_printable(text) ? "" : what + " is not printable UTF-8";
}

static std::string count_error(const std::string & what, size_t n, size_t n_max) {
    return n <= n_max ? "" : std::to_string(n) + " " + what + ", the most is " + std::to_string(n_max);
}

static std::string content_error(const server_page_identity & identity) {
    std::string error = count_error("fields of the identity", identity.fields.size(), N_FIELDS_MAX);

    for (size_t i = 0; i < identity.fields.size() && error.empty(); i++) {
        const auto & [name, value] = identity.fields[i];

        error = text_error("the name of field " + std::to_string(i + 1) + " of the identity", name, N_BYTES_NAME_MAX);
        if (error.empty()) {
            error = text_error("the value of '" + name + "'", value, N_BYTES_VALUE_MAX);
        }
        for (size_t k = 0; k < i && error.empty(); k++) {
            error = identity.fields[k].first == name ? "the field '" + name + "' is there twice" : "";
        }
    }
    return error;
}

static std::string content_error(const std::vector<server_page_member> & members) {
    std::vector<size_t> n_found(MEMBERS.size());
    for (const auto & member : members) {
        const auto it = std::find(MEMBERS.begin(), MEMBERS.end(), member.suffix);
        if (it == MEMBERS.end()) {
            return "a member is neither the page's own file nor its .lora nor its .dft";
        }
        if (++n_found[it - MEMBERS.begin()] > 1) {
            return "the member '" + member.suffix + "' is there twice";
        }
    }
    return n_found[0] == 1 ? "" : "the page's own file is not among the members";
}

static std::string content_error(const server_page_checkpoint & checkpoint) {
    if (checkpoint.n_tokens < 0) {
        return "a checkpoint has " + std::to_string(checkpoint.n_tokens) + " tokens, the least is 0";
    }
    if (checkpoint.pos_min < 0 || checkpoint.pos_min > checkpoint.pos_max) {
        return "a checkpoint has the positions " + std::to_string(checkpoint.pos_min) + " to " + std::to_string(checkpoint.pos_max) +
                ", the first must not be negative and not above the last";
    }
    return "";
}

static std::string content_error(int32_t pos_max_target, int32_t pos_max_draft) {
    if (pos_max_target >= -1 && pos_max_draft >= -1) {
        return "";
    }
    return "the last positions are " + std::to_string(pos_max_target) + " and " + std::to_string(pos_max_draft) + ", the least is -1";
}

static std::string content_error(const server_page_lora & page) {
    std::string error = count_error("adapters", page.adapters.size(), N_ADAPTERS_MAX);

    for (size_t i = 0; i < page.adapters.size() && error.empty(); i++) {
        error = text_error("the fingerprint of adapter " + std::to_string(i + 1), page.adapters[i].first, N_BYTES_VALUE_MAX);
        if (error.empty() && !std::isfinite(page.adapters[i].second)) {
            error = "the scale of adapter " + std::to_string(i + 1) + " is no finite number";
        }
    }
    return error;
}

//
// encode
//

// little-endian, whatever the host is
struct codec_writer {
    std::vector<uint8_t> bytes;

    void number(uint64_t value, int n_bytes) {
        for (int i = 0; i < n_bytes; i++) {
            bytes.push_back(uint8_t(value >> (8 * i)));
        }
    }

    void u32(uint64_t value) { number(value, 4); }
    void u64(uint64_t value) { number(value, 8); }

    void text(const std::string & value) {
        u32(value.size());
        bytes.insert(bytes.end(), value.begin(), value.end());
    }
};

struct codec_section_parts {
    uint32_t id;
    std::vector<server_page_span> parts;
};

static server_page_span own(server_page_bytes & file, codec_writer && made) {
    file.owned.push_back(std::move(made.bytes));
    return { file.owned.back().data(), file.owned.back().size() };
}

// the first bytes of every file of a kind
static codec_writer begin_of(const codec_layout & layout) {
    codec_writer res;
    res.bytes.assign(std::begin(MAGIC), std::end(MAGIC));
    res.u32(layout.kind);
    res.u32(SERVER_PAGE_CODEC_VERSION);
    return res;
}

static void seal(server_page_bytes & file, const codec_layout & layout, const std::vector<codec_section_parts> & sections) {
    codec_writer header = begin_of(layout);
    header.u32(sections.size());

    for (const auto & section : sections) {
        uint64_t size = 0;
        for (const auto & part : section.parts) {
            size += part.size;
        }
        header.u32(section.id);
        header.u64(size);
        header.u64(server_page_checksum(section.parts));
    }
    header.u64(server_page_checksum(header.bytes.data(), header.bytes.size()));

    file.parts.push_back(own(file, std::move(header)));
    for (const auto & section : sections) {
        for (const auto & part : section.parts) {
            if (part.size > 0) {
                file.parts.push_back(part);
            }
        }
    }
}

static std::string content_error(const server_page_ckpt & page) {
    std::string error = content_error(page.identity);
    if (error.empty()) {
        error = content_error(page.members);
    }
    if (error.empty()) {
        error = content_error(page.pos_max_target, page.pos_max_draft);
    }
    if (error.empty()) {
        error = count_error("checkpoints", page.checkpoints.size(), N_CHECKPOINTS_MAX);
    }
    for (size_t i = 0; i < page.checkpoints.size() && error.empty(); i++) {
        error = content_error(page.checkpoints[i]);
    }
    return error;
}

server_page_bytes server_page_encode(const server_page_ckpt & page) {
    server_page_bytes res;
    res.error = content_error(page);
    if (!res.error.empty()) {
        return res;
    }

    codec_writer identity;
    identity.u32(page.identity.fields.size());
    for (const auto & [name, value] : page.identity.fields) {
        identity.text(name);
        identity.text(value);
    }

    codec_writer members;
    members.u32(page.members.size());
    for (const auto & member : page.members) {
        members.text(member.suffix);
        members.u64(member.n_bytes);
        members.u64(member.checksum);
    }

    codec_writer positions;
    positions.u32(uint32_t(page.pos_max_target));
    positions.u32(uint32_t(page.pos_max_draft));

    std::vector<codec_section_parts> sections = {
        { SECTION_IDENTITY,  { own(res, std::move(identity))  } },
        { SECTION_MEMBERS,   { own(res, std::move(members))   } },
        { SECTION_POSITIONS, { own(res, std::move(positions)) } },
    };

    for (const auto & checkpoint : page.checkpoints) {
        codec_writer head;
        head.u64(uint64_t(checkpoint.n_tokens));
        head.u32(uint32_t(checkpoint.pos_min));
        head.u32(uint32_t(checkpoint.pos_max));
        head.u64(checkpoint.target.size);
        head.u64(checkpoint.draft.size);
        head.u64(checkpoint.spec.size);

        sections.push_back({ SECTION_CHECKPOINT, { own(res, std::move(head)), checkpoint.target, checkpoint.draft, checkpoint.spec } });
    }

    seal(res, LAYOUT_CKPT, sections);
    return res;
}

server_page_bytes server_page_encode(const server_page_lora & page) {
    server_page_bytes res;
    res.error = content_error(page);
    if (!res.error.empty()) {
        return res;
    }

    codec_writer adapters;
    adapters.u32(page.adapters.size());
    for (const auto & [fingerprint, scale] : page.adapters) {
        uint32_t bits;
        std::memcpy(&bits, &scale, sizeof(bits));

        adapters.text(fingerprint);
        adapters.u32(bits);
    }

    seal(res, LAYOUT_LORA, { { SECTION_ADAPTERS, { own(res, std::move(adapters)) } } });
    return res;
}

server_page_bytes server_page_encode(const server_page_draft & page) {
    server_page_bytes res;
    seal(res, LAYOUT_DRAFT, { { SECTION_STATE, { page.state } }, { SECTION_SPEC, { page.spec } } });
    return res;
}

//
// decode
//

// after the first error every read gives nothing
struct codec_reader {
    const uint8_t * data;
    size_t          size;

    std::string error = "";

    uint64_t number(size_t n_bytes) {
        const auto bytes = span(n_bytes);

        uint64_t res = 0;
        for (size_t i = bytes.size; i-- > 0;) {
            res = res << 8 | static_cast<const uint8_t *>(bytes.data)[i];
        }
        return res;
    }

    uint32_t u32() { return uint32_t(number(4)); }
    uint64_t u64() { return number(8); }
    int32_t  i32() { return int32_t(u32()); }

    server_page_span span(uint64_t n_bytes) {
        if (n_bytes > size) {
            fail("its content is longer than the section");
        }
        if (!error.empty()) {
            return {};
        }

        const server_page_span res = { data, size_t(n_bytes) };
        data += res.size;
        size -= res.size;
        return res;
    }

    std::string text(size_t n_bytes_max) {
        const uint32_t n = u32();
        if (n > n_bytes_max) {
            fail("a text of " + std::to_string(n) + " bytes, the most is " + std::to_string(n_bytes_max));
        }
        const auto bytes = span(n);
        return bytes.size == 0 ? "" : std::string(static_cast<const char *>(bytes.data), bytes.size);
    }

    uint32_t count(const char * what, size_t n_max) {
        const uint32_t n = u32();
        fail(count_error(what, n, n_max));
        return error.empty() ? n : 0;
    }

    void end() {
        fail(size == 0 ? "" : std::to_string(size) + " bytes follow its content");
    }

    void fail(const std::string & what) {
        if (error.empty()) {
            error = what;
        }
    }
};

struct codec_section {
    uint32_t id;
    size_t   n; // which one of the file, the first is 1
    const uint8_t * data;
    size_t   size;
    uint64_t checksum;

    bool is_whole() const { return server_page_checksum(data, size) == checksum; }
};

static server_page_decode_result corrupt(const std::string & message) {
    return { SERVER_PAGE_DECODE_CORRUPT, message };
}

static server_page_decode_result corrupt(const codec_section & section, const std::string & message) {
    return corrupt("section " + std::to_string(section.n) + " (" + section_name(section.id) + "): " + message);
}

static server_page_decode_result torn(size_t size, const std::string & wanted) {
    return { SERVER_PAGE_DECODE_TORN, "the file is cut off: it has " + std::to_string(size) + " bytes, " + wanted };
}

static bool has_magic(const uint8_t * data, size_t size) {
    return std::equal(data, data + std::min(size, sizeof(MAGIC)), MAGIC);
}

// the kind of a file of which the first bytes were damaged: with those that the kind begins with, the header has its checksum
static const codec_layout * find_damaged_begin(const uint8_t * data, size_t size) {
    if (size < N_BYTES_FIXED) {
        return nullptr;
    }
    const uint64_t n_header = header_size(codec_reader{ data + N_BYTES_BEGIN, sizeof(uint32_t) }.u32());
    if (n_header + sizeof(uint64_t) > std::min(size, SERVER_PAGE_HEADER_SIZE_MAX)) {
        return nullptr;
    }
    const uint64_t checksum = codec_reader{ data + n_header, sizeof(uint64_t) }.u64();

    const server_page_span rest = { data + N_BYTES_BEGIN, size_t(n_header) - N_BYTES_BEGIN };

    for (const auto * layout : { &LAYOUT_CKPT, &LAYOUT_LORA, &LAYOUT_DRAFT }) {
        const auto begin = begin_of(*layout).bytes;
        if (!std::equal(begin.begin(), begin.end(), data) && server_page_checksum({ { begin.data(), begin.size() }, rest }) == checksum) {
            return layout;
        }
    }
    return nullptr;
}

bool server_page_is_foreign(const server_page_span & contents) {
    const auto * data = static_cast<const uint8_t *>(contents.data);

    return !has_magic(data, contents.size) && !find_damaged_begin(data, contents.size);
}

bool server_page_is_ours(const server_page_span & contents) {
    return contents.size >= SERVER_PAGE_MAGIC_SIZE && !server_page_is_foreign(contents);
}

// the sections of a file, in order: all are inside of it, and those that are there once are whole
// nothing is allocated before the header's checksum and every size have been found right
static server_page_decode_result read_sections(
        const codec_layout & layout, const uint8_t * data, size_t size, std::vector<codec_section> & sections) {
    if (const auto * written_as = find_damaged_begin(data, size)) {
        return corrupt("its first " + std::to_string(N_BYTES_BEGIN) + " bytes are damaged: the rest of its header is that of a " +
                written_as->suffix + " file");
    }
    if (!has_magic(data, size)) {
        return { SERVER_PAGE_DECODE_FOREIGN, "the file does not begin as a page's files do: it is another program's, or was overwritten" };
    }
    if (size < N_BYTES_FIXED) {
        return torn(size, "the first part of the header alone has " + std::to_string(N_BYTES_FIXED));
    }

    codec_reader fixed = { data + sizeof(MAGIC), N_BYTES_FIXED - sizeof(MAGIC) };

    const uint32_t kind    = fixed.u32();
    const uint32_t version = fixed.u32();
    const uint32_t n       = fixed.u32();

    if (kind != layout.kind) {
        return corrupt("the file is of kind " + std::to_string(kind) + ", a " + layout.suffix + " file is of kind " +
                std::to_string(layout.kind));
    }
    if (version != SERVER_PAGE_CODEC_VERSION) {
        return { SERVER_PAGE_DECODE_VERSION, "the file has format version " + std::to_string(version) + ", this server reads version " +
                std::to_string(SERVER_PAGE_CODEC_VERSION) };
    }

    const uint64_t n_header = header_size(n);
    if (n_header + sizeof(uint64_t) > size) {
        return torn(size, "its header alone has " + std::to_string(n_header + sizeof(uint64_t)));
    }
    if (codec_reader{ data + n_header, sizeof(uint64_t) }.u64() != server_page_checksum(data, n_header)) {
        return corrupt("the header's checksum is wrong");
    }

    const size_t n_once = layout.once.size();
    if (n < n_once || n > n_once + layout.n_checkpoints_max) {
        return corrupt("the file has " + std::to_string(n) + " sections, a " + layout.suffix + " file has " + std::to_string(n_once) +
                " to " + std::to_string(n_once + layout.n_checkpoints_max));
    }

    const codec_reader table = { data + N_BYTES_FIXED, size_t(n_header) - N_BYTES_FIXED };
    const codec_reader rest  = { data + n_header + sizeof(uint64_t), size - size_t(n_header) - sizeof(uint64_t) };

    codec_reader entries = table;
    size_t n_left  = rest.size;

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t id      = entries.u32();
        const uint64_t n_bytes = entries.u64();
        entries.u64();

        const uint32_t id_due = i < n_once ? layout.once[i] : uint32_t(SECTION_CHECKPOINT);
        if (id != id_due) {
            return corrupt("section " + std::to_string(i + 1) + " has id " + std::to_string(id) + " (" + section_name(id) + "), " +
                    std::to_string(id_due) + " (" + section_name(id_due) + ") is due there");
        }
        if (n_bytes > n_left) {
            return torn(size, "section " + std::to_string(i + 1) + " (" + section_name(id) + ") is to have " +
                    std::to_string(n_bytes) + " where " + std::to_string(n_left) + " are left");
        }
        n_left -= n_bytes;
    }
    if (n_left > 0) {
        return corrupt(std::to_string(n_left) + " bytes follow the last section");
    }

    codec_reader bytes = rest;
    entries = table;
    sections.reserve(n);

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t id       = entries.u32();
        const uint64_t n_bytes  = entries.u64();
        const uint64_t checksum = entries.u64();

        sections.push_back({ id, i + 1, bytes.data, size_t(n_bytes), checksum });
        bytes.span(n_bytes);
    }

    for (size_t i = 0; i < n_once; i++) {
        if (!sections[i].is_whole()) {
            return corrupt(sections[i], "its checksum is wrong");
        }
    }
    return {};
}

// what a section's content was read into is good where it was used up and keeps the rules
static server_page_decode_result finish(const codec_section & section, codec_reader & content, const std::string & error) {
    content.end();
    content.fail(error);

    return content.error.empty() ? server_page_decode_result{} : corrupt(section, content.error);
}

static server_page_decode_result read_identity(const codec_section & section, server_page_identity & identity) {
    codec_reader content = { section.data, section.size };

    const uint32_t n = content.count("fields of the identity", N_FIELDS_MAX);
    for (uint32_t i = 0; i < n && content.error.empty(); i++) {
        const auto name  = content.text(N_BYTES_NAME_MAX);
        const auto value = content.text(N_BYTES_VALUE_MAX);
        identity.fields.emplace_back(name, value);
    }
    return finish(section, content, content_error(identity));
}

static server_page_decode_result read_members(const codec_section & section, std::vector<server_page_member> & members) {
    codec_reader content = { section.data, section.size };

    const uint32_t n = content.count("members", MEMBERS.size());
    for (uint32_t i = 0; i < n && content.error.empty(); i++) {
        server_page_member member;
        member.suffix   = content.text(N_BYTES_NAME_MAX);
        member.n_bytes  = content.u64();
        member.checksum = content.u64();
        members.push_back(member);
    }
    return finish(section, content, content_error(members));
}

static server_page_decode_result read_positions(const codec_section & section, server_page_ckpt & page) {
    codec_reader content = { section.data, section.size };

    page.pos_max_target = content.i32();
    page.pos_max_draft  = content.i32();

    return finish(section, content, content_error(page.pos_max_target, page.pos_max_draft));
}

static server_page_decode_result read_checkpoint(const codec_section & section, server_page_checkpoint & checkpoint) {
    codec_reader content = { section.data, section.size };

    checkpoint.n_tokens = int64_t(content.u64());
    checkpoint.pos_min  = content.i32();
    checkpoint.pos_max  = content.i32();

    const uint64_t n_target = content.u64();
    const uint64_t n_draft  = content.u64();
    const uint64_t n_spec   = content.u64();

    checkpoint.target = content.span(n_target);
    checkpoint.draft  = content.span(n_draft);
    checkpoint.spec   = content.span(n_spec);

    return finish(section, content, content_error(checkpoint));
}

static server_page_decode_result read_adapters(const codec_section & section, server_page_lora & page) {
    codec_reader content = { section.data, section.size };

    const uint32_t n = content.count("adapters", N_ADAPTERS_MAX);
    for (uint32_t i = 0; i < n && content.error.empty(); i++) {
        const auto fingerprint = content.text(N_BYTES_VALUE_MAX);

        const uint32_t bits = content.u32();
        float scale;
        std::memcpy(&scale, &bits, sizeof(scale));

        page.adapters.emplace_back(fingerprint, scale);
    }
    return finish(section, content, content_error(page));
}

static server_page_decode_result read_checkpoints(const std::vector<codec_section> & sections, server_page_ckpt & page) {
    page.checkpoints.reserve(sections.size() - LAYOUT_CKPT.once.size());

    for (size_t i = LAYOUT_CKPT.once.size(); i < sections.size(); i++) {
        if (!sections[i].is_whole()) {
            page.n_lost++;
            continue;
        }

        server_page_checkpoint checkpoint;
        const auto res = read_checkpoint(sections[i], checkpoint);
        if (res.status != SERVER_PAGE_DECODE_OK) {
            return res; // it is what was written: whoever wrote it is not to be trusted with the rest either
        }
        page.checkpoints.push_back(checkpoint);
    }
    return {};
}

server_page_decode_result server_page_decode(const uint8_t * data, size_t size, server_page_ckpt & out) {
    server_page_ckpt page;
    std::vector<codec_section> sections;

    auto res = read_sections(LAYOUT_CKPT, data, size, sections);
    if (res.status == SERVER_PAGE_DECODE_OK) {
        res = read_identity(sections[0], page.identity);
    }
    if (res.status == SERVER_PAGE_DECODE_OK) {
        res = read_members(sections[1], page.members);
    }
    if (res.status == SERVER_PAGE_DECODE_OK) {
        res = read_positions(sections[2], page);
    }
    if (res.status == SERVER_PAGE_DECODE_OK) {
        res = read_checkpoints(sections, page);
    }

    out = res.status == SERVER_PAGE_DECODE_OK ? std::move(page) : server_page_ckpt();
    return res;
}

server_page_decode_result server_page_decode(const uint8_t * data, size_t size, server_page_lora & out) {
    server_page_lora page;
    std::vector<codec_section> sections;

    auto res = read_sections(LAYOUT_LORA, data, size, sections);
    if (res.status == SERVER_PAGE_DECODE_OK) {
        res = read_adapters(sections[0], page);
    }

    out = res.status == SERVER_PAGE_DECODE_OK ? std::move(page) : server_page_lora();
    return res;
}

server_page_decode_result server_page_decode(const uint8_t * data, size_t size, server_page_draft & out) {
    std::vector<codec_section> sections;

    const auto res = read_sections(LAYOUT_DRAFT, data, size, sections);

    out = {};
    if (res.status == SERVER_PAGE_DECODE_OK) {
        out.state = { sections[0].data, sections[0].size };
        out.spec  = { sections[1].data, sections[1].size };
    }
    return res;
}

//
// compare
//

static const std::string * find_field(const server_page_identity & identity, const std::string & name) {
    for (const auto & field : identity.fields) {
        if (field.first == name) {
            return &field.second;
        }
    }
    return nullptr;
}

std::vector<server_page_difference> server_page_compare(const server_page_identity & page, const server_page_identity & server) {
    std::vector<server_page_difference> res;

    for (const auto & [name, value] : page.fields) {
        const auto * other = find_field(server, name);
        if (!other || *other != value) {
            res.push_back({ name, value, other ? *other : "" });
        }
    }
    for (const auto & [name, value] : server.fields) {
        if (!find_field(page, name)) {
            res.push_back({ name, "", value });
        }
    }
    return res;
}
