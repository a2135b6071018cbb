#include "server-page-check.h"

#include <algorithm>
#include <cstring>

static const char * const SUFFIX_CKPT = ".ckpt";
static const char * const SUFFIX_LORA = ".lora";
static const char * const SUFFIX_DFT  = ".dft";

static const char * const NOT_OF_THIS_STATE = "it is not the file that was written with this state";
static const char * const NOT_VOUCHED_FOR   = "only a good .ckpt says that it belongs to this state";

typedef std::vector<server_page_check_file> files_t;

static const uint8_t * data_of(const server_page_span & span) {
    return static_cast<const uint8_t *>(span.data);
}

// nullptr: it is not there
static const server_page_span * find_file(const files_t & files, const std::string & suffix) {
    const auto it = std::find_if(files.begin(), files.end(), [&](const auto & file) { return file.suffix == suffix; });

    return it == files.end() ? nullptr : &it->contents;
}

static const server_page_member * find_member(const server_page_ckpt & ckpt, const std::string & suffix) {
    const auto it = std::find_if(ckpt.members.begin(), ckpt.members.end(), [&](const auto & member) { return member.suffix == suffix; });

    return it == ckpt.members.end() ? nullptr : &*it;
}

// whether a file is the one that was published with FILE.ckpt
static bool is_member(const server_page_ckpt & ckpt, const std::string & suffix, const server_page_span & file) {
    const auto * member = find_member(ckpt, suffix);

    return member && member->n_bytes == file.size && member->checksum == server_page_checksum(file.data, file.size);
}

// a version that the checksum does not vouch for is a version that was damaged
static bool is_whole_of_other_version(const server_page_ckpt & ckpt, const std::string & suffix, const server_page_span * file,
        server_page_decode_status status) {
    return status == SERVER_PAGE_DECODE_VERSION && file && is_member(ckpt, suffix, *file);
}

template <typename T>
static server_page_decode_result decode(const server_page_span * file, T & out) {
    return file ? server_page_decode(data_of(*file), file->size, out) : server_page_decode_result { SERVER_PAGE_DECODE_TORN, "it is missing" };
}

// as far as there is any of it; an empty file is nobody's
static bool may_be_ours(const server_page_span & file) {
    return file.size > 0 && !server_page_is_foreign(file);
}

server_page_head server_page_read_head(const server_page_span & file, uint32_t magic, uint32_t version) {
    uint32_t head[3] = {};
    std::memcpy(head, file.data ? file.data : head, std::min(file.size, sizeof(head)));

    if (file.size < sizeof(head[0]) || head[0] != magic) {
        return SERVER_PAGE_HEAD_FOREIGN;
    }
    if (file.size >= 2*sizeof(head[0]) && head[1] != version) {
        return SERVER_PAGE_HEAD_VERSION;
    }
    if (file.size < sizeof(head) || head[2] > (file.size - sizeof(head))/sizeof(int32_t)) {
        return SERVER_PAGE_HEAD_DAMAGED;
    }
    return SERVER_PAGE_HEAD_OK;
}

static void refuse(server_page_checked & res, server_page_check_status status, const std::string & suffix, const std::string & why) {
    res.status = status;
    res.suffix = suffix;
    res.why    = why;
}

// false: there is one, and it is not good. Nothing vouches for FILE then, which might be another model's state
static bool check_ckpt(server_page_checked & res, const std::string & name, const server_page_span * file, const server_page_decode_result & decoded) {
    if (!file || decoded.status == SERVER_PAGE_DECODE_OK || decoded.status == SERVER_PAGE_DECODE_FOREIGN) {
        return true;
    }
    const bool is_version = decoded.status == SERVER_PAGE_DECODE_VERSION;

    const std::string ckpt = "'" + name + SUFFIX_CKPT + "'";
    refuse(res, is_version ? SERVER_PAGE_CHECK_UNKNOWN : SERVER_PAGE_CHECK_DAMAGED, SUFFIX_CKPT,
            "is vouched for by nothing: " + ckpt + (is_version ? " was written by another version" : " is damaged") + " (" + decoded.message +
            "). To load the state unchecked, as llama-server does without sidecars, remove " + ckpt + " or move '" + name + "' alone elsewhere");
    return false;
}

// false: FILE is none that can be restored
static bool check_state(server_page_checked & res, const std::string & name, server_page_head head, const server_page_span & file, bool is_nobodys) {
    const auto * member   = find_member(res.ckpt, "");
    const bool   is_whole = member && is_member(res.ckpt, "", file);

    if (head != SERVER_PAGE_HEAD_OK) {
        // what the checksum vouches for is what was written, and an older or newer libllama can read it
        const bool undamaged = is_whole || is_nobodys || (!member && head == SERVER_PAGE_HEAD_VERSION);

        refuse(res, undamaged ? SERVER_PAGE_CHECK_UNKNOWN : SERVER_PAGE_CHECK_DAMAGED, "", "is no state of a slot, or its head is damaged");
        return false;
    }
    if (member && !is_whole) {
        refuse(res, SERVER_PAGE_CHECK_DAMAGED, "", "is damaged: it is not what was written with '" + name + SUFFIX_CKPT + "'");
        return false;
    }
    return true;
}

// the adapters that the state was computed with; without them it is good for nothing
static bool check_lora(server_page_checked & res, const std::string & name, const server_page_span * file, bool is_other_file) {
    const bool is_listed = res.has_ckpt && find_member(res.ckpt, SUFFIX_LORA);

    if (res.has_ckpt && !is_listed) {
        if (file && may_be_ours(*file)) {
            res.losses.push_back({ SUFFIX_LORA, NOT_OF_THIS_STATE });
        }
        res.lora.emplace();
        return true;
    }
    if (!res.has_ckpt && !file) {
        return true;
    }

    server_page_lora lora;

    auto decoded = decode(file, lora);
    if (decoded.message.empty() && (is_other_file || (is_listed && !is_member(res.ckpt, SUFFIX_LORA, *file)))) {
        decoded = { SERVER_PAGE_DECODE_CORRUPT, NOT_OF_THIS_STATE };
    }
    if (decoded.message.empty()) {
        res.lora = std::move(lora);
        return true;
    }

    const bool undamaged = is_listed ? is_whole_of_other_version(res.ckpt, SUFFIX_LORA, file, decoded.status)
        : decoded.status == SERVER_PAGE_DECODE_VERSION || decoded.status == SERVER_PAGE_DECODE_FOREIGN;

    refuse(res, undamaged ? SERVER_PAGE_CHECK_UNKNOWN : SERVER_PAGE_CHECK_DAMAGED, SUFFIX_LORA,
            "was computed with adapters that are not known: '" + name + SUFFIX_LORA + "': " + decoded.message);
    return false;
}

// true: it is of another version
static bool check_draft(server_page_checked & res, const server_page_span * file) {
    if (!res.has_ckpt || !find_member(res.ckpt, SUFFIX_DFT)) {
        if (file && may_be_ours(*file)) {
            res.losses.push_back({ SUFFIX_DFT, res.has_ckpt ? NOT_OF_THIS_STATE : NOT_VOUCHED_FOR });
        }
        return false;
    }

    server_page_draft draft;

    auto decoded = decode(file, draft);
    if (decoded.message.empty() && !is_member(res.ckpt, SUFFIX_DFT, *file)) {
        decoded = { SERVER_PAGE_DECODE_CORRUPT, NOT_OF_THIS_STATE };
    }
    if (decoded.message.empty()) {
        res.draft = draft;
    } else {
        res.losses.push_back({ SUFFIX_DFT, decoded.message });
    }
    return is_whole_of_other_version(res.ckpt, SUFFIX_DFT, file, decoded.status);
}

server_page_checked server_page_check(const std::string & name, server_page_head head, const files_t & files) {
    server_page_checked res;

    const auto * file = find_file(files, "");

    const auto ckpt = decode(find_file(files, SUFFIX_CKPT), res.ckpt);
    res.has_ckpt = ckpt.status == SERVER_PAGE_DECODE_OK;

    bool any_ours = false;
    for (const auto & [suffix, contents] : files) {
        if (suffix.empty()) {
            continue;
        }
        const bool is_listed = find_member(res.ckpt, suffix);
        if (!is_listed && server_page_is_foreign(contents)) {
            res.foreign.push_back(suffix);
        }
        any_ours = any_ours || is_listed || may_be_ours(contents);
    }

    if (!file) {
        refuse(res, SERVER_PAGE_CHECK_DAMAGED, "", "is missing");
        return res;
    }
    const bool is_nobodys = head == SERVER_PAGE_HEAD_FOREIGN && !any_ours;
    if (!is_nobodys && !check_ckpt(res, name, find_file(files, SUFFIX_CKPT), ckpt)) {
        return res;
    }
    // another program wrote it, which knows no sidecars, or it was cut off: then libllama does not take it
    const uint64_t n_written     = res.has_ckpt ? find_member(res.ckpt, "")->n_bytes : file->size;
    const bool     is_other_file = n_written != file->size;

    if (is_other_file) {
        res.losses.push_back({ SUFFIX_CKPT, "it was written with " + std::to_string(n_written) + " bytes of '" + name + "', which has " +
                std::to_string(file->size) + ": another program wrote that since, or it is damaged, which only a restore can tell" });
        res.has_ckpt = false;
        res.ckpt     = {};
    } else if (!res.has_ckpt) {
        res.losses.push_back({ SUFFIX_CKPT, ckpt.message });
    } else if (res.ckpt.n_lost > 0) {
        res.losses.push_back({ SUFFIX_CKPT, std::to_string(res.ckpt.n_lost) + " checkpoints are damaged" });
    }
    if (!check_state(res, name, head, *file, is_nobodys) || !check_lora(res, name, find_file(files, SUFFIX_LORA), is_other_file)) {
        return res;
    }
    const bool is_other_version = check_draft(res, find_file(files, SUFFIX_DFT));

    res.status = !any_ours ? SERVER_PAGE_CHECK_PLAIN
        : is_other_version ? SERVER_PAGE_CHECK_UNKNOWN
        : res.losses.empty() ? SERVER_PAGE_CHECK_WHOLE : SERVER_PAGE_CHECK_DEGRADED;

    return res;
}
