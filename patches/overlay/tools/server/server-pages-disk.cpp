#include "server-pages-disk.h"

#include "server-common.h"
#include "server-faults.h"
#include "server-page-check.h"
#include "server-page-commit.h"
#include "server-page-guard.h"
#include "server-page-os-paced.h"

#include "llama.h"
#include "../../src/llama-ext.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <thread>

static const char * SUFFIX_CKPT = ".ckpt";
static const char * SUFFIX_LORA = ".lora";
static const char * SUFFIX_DFT  = ".dft";

static const server_page_guard GUARD = server_page_guard_of(LLAMA_STATE_SEQ_MAGIC, LLAMA_STATE_SEQ_VERSION);

static server_page_result files_refused(const server_page_request & request, const server_page_files_result & from) {
    switch (from.status) {
        case SERVER_PAGE_FILES_OK:        return {};
        case SERVER_PAGE_FILES_NOT_FOUND: return server_page_refused(request, SERVER_PAGE_REASON_NO_FILE,      from.message);
        case SERVER_PAGE_FILES_BAD_NAME:  return server_page_refused(request, SERVER_PAGE_REASON_BAD_NAME,     from.message);
        case SERVER_PAGE_FILES_DECLINED:  return server_page_refused(request, SERVER_PAGE_REASON_CEILING,      from.message);
        case SERVER_PAGE_FILES_CORRUPT:   return server_page_refused(request, SERVER_PAGE_REASON_BAD_FILE,     from.message);
        case SERVER_PAGE_FILES_NO_SPACE:  return server_page_refused(request, SERVER_PAGE_REASON_NO_SPACE,     from.message);
        case SERVER_PAGE_FILES_NO_ACCESS: return server_page_refused(request, SERVER_PAGE_REASON_NO_ACCESS,    from.message);
        case SERVER_PAGE_FILES_IO:
        case SERVER_PAGE_FILES_PENDING:   return server_page_refused(request, SERVER_PAGE_REASON_FILES_FAILED, from.message);
    }
    return {};
}

static server_page_request request_of(const server_page_result & held) {
    server_page_request res;
    res.id_slot = held.id_slot;
    res.name    = held.name;
    return res;
}

//
// page -> files
//

static server_page_span span(const std::vector<uint8_t> & bytes) {
    return { bytes.data(), bytes.size() };
}

static server_page_member member(const server_page_file & file, server_pace & pace) {
    server_page_checksum_state checksum;

    server_page_member res;
    res.suffix = file.suffix;
    for (const auto & part : file.parts) {
        pace.in_pieces(part.size, [&](size_t offset, size_t n_bytes) {
            checksum.add(static_cast<const uint8_t *>(part.data) + offset, n_bytes);
            return true;
        });
        res.n_bytes += part.size;
    }
    res.checksum = checksum.value();
    return res;
}

server_page_result server_page_save(const std::string & dir, const std::string & filename, server_page_result && held) {
    const auto & page = static_cast<const server_page &>(*held.held);

    const std::vector<char> packed = page.prompt.tokens.serialize();
    const auto * tokens   = reinterpret_cast<const llama_token *>(packed.data());
    const size_t n_tokens = packed.size()/sizeof(llama_token);

    std::vector<uint8_t> head(llama_state_seq_file_head(tokens, n_tokens, nullptr, 0));
    llama_state_seq_file_head(tokens, n_tokens, head.data(), head.size());

    const size_t n_head_state = llama_state_seq_data_head(nullptr, 0);

    std::vector<server_page_file> to_publish = {
        { "", { span(head), { page.state.tgt + n_head_state, page.state.size.tgt - n_head_state } } },
    };

    server_page_lora lora;
    lora.adapters = held.adapters;

    server_page_draft draft;
    draft.state = { page.state.dft, page.state.size.dft };
    draft.spec  = span(held.packed_spec);

    const auto bytes_lora  = server_page_encode(lora);
    const auto bytes_draft = server_page_encode(draft);

    if (!lora.adapters.empty()) {
        to_publish.push_back({ SUFFIX_LORA, bytes_lora.parts });
    }
    if (draft.state.size + draft.spec.size > 0) {
        to_publish.push_back({ SUFFIX_DFT, bytes_draft.parts });
    }

    server_page_ckpt ckpt;
    ckpt.identity       = page.made_for;
    ckpt.pos_max_target = page.state.pos_max_tgt;
    ckpt.pos_max_draft  = page.state.pos_max_dft;
    for (const auto & each : page.prompt.checkpoints) {
        ckpt.checkpoints.push_back({ each.n_tokens, each.pos_min, each.pos_max, span(each.data_tgt), span(each.data_dft), span(each.data_spec) });
    }

    server_page_files_result done;

    // a thread of its own: a priority that was lowered cannot be raised again
    std::thread([&]() {
        server_page_os_give_way();

        server_pace pace(held.beside_decoding);

        for (const auto & file : to_publish) {
            ckpt.members.push_back(member(file, pace));
            held.n_bytes_file += ckpt.members.back().n_bytes;
        }

        const auto bytes_ckpt = server_page_encode(ckpt);
        const auto error      = bytes_lora.error + bytes_draft.error + bytes_ckpt.error;
        if (!error.empty()) {
            done = { SERVER_PAGE_FILES_IO, "this page cannot be written: " + error };
            return;
        }

        to_publish.push_back({ SUFFIX_CKPT, bytes_ckpt.parts });
        held.n_bytes_file += member(to_publish.back(), pace).n_bytes;

        server_page_os_paced os(server_page_os_native(), pace);
        done = server_page_files(os, dir, GUARD).publish(filename, to_publish);
    }).join();

    held.filename = filename;

    if (!done.ok()) {
        auto refused = files_refused(request_of(held), done);
        if (done.status == SERVER_PAGE_FILES_NOT_FOUND) {
            refused.reason = SERVER_PAGE_REASON_FILES_FAILED; // the directory
        }
        refused.held = std::move(held.held);
        return refused;
    }
    if (!done.message.empty()) {
        SRV_WRN("'%s' is saved; beside that: %s\n", filename.c_str(), done.message.c_str());
    }

    return std::move(held);
}

//
// files -> page
//

// a file's content, as it was read
struct loaded_files {
    std::vector<std::pair<std::string, server_slot_page_buffer>> buffers;
    std::vector<std::pair<std::string, uint64_t>>                sizes;

    uint8_t * add(const std::string & suffix, uint64_t n_bytes) {
        server_slot_page_buffer buffer;
        buffer.reserve(n_bytes);
        buffers.emplace_back(suffix, std::move(buffer));
        sizes.emplace_back(suffix, n_bytes);
        return buffers.back().second.data();
    }

    // nullptr: it is not there
    server_slot_page_buffer * find(const std::string & suffix) {
        for (auto & [name, buffer] : buffers) {
            if (name == suffix) {
                return &buffer;
            }
        }
        return nullptr;
    }

    std::vector<server_page_check_file> files() {
        std::vector<server_page_check_file> res;
        for (const auto & [suffix, n_bytes] : sizes) {
            res.push_back({ suffix, { find(suffix)->data(), n_bytes } });
        }
        return res;
    }

    size_t size(const std::string & suffix) const {
        for (const auto & [name, n_bytes] : sizes) {
            if (name == suffix) {
                return n_bytes;
            }
        }
        return 0;
    }
};

static std::vector<uint8_t> bytes_of(const server_page_span & span) {
    const auto * data = static_cast<const uint8_t *>(span.data);

    return span.size > 0 ? std::vector<uint8_t>(data, data + span.size) : std::vector<uint8_t>();
}

static server_page_result unpack(const server_page_request & request, loaded_files & loaded, server_page & page) {
    auto & unpacked = *page.unpacked;

    // the state and its tokens
    uint8_t *    file   = loaded.find("")->data();
    const size_t n_file = loaded.size("");

    size_t n_tokens      = 0;
    size_t offset_tokens = 0;
    size_t offset_state  = 0;
    const bool parsed = llama_state_seq_file_parse(file, n_file, &n_tokens, &offset_tokens, &offset_state);

    auto checked = server_page_check(request.name, parsed ? SERVER_PAGE_HEAD_OK : SERVER_PAGE_HEAD_DAMAGED, loaded.files());
    if (!checked.why.empty()) {
        return server_page_refused(request, SERVER_PAGE_REASON_BAD_FILE, "'" + request.name + "' " + checked.why);
    }

    unpacked.has_ckpt = checked.has_ckpt;
    unpacked.losses   = std::move(checked.losses);

    page.made_for          = std::move(checked.ckpt.identity);
    page.state.pos_max_tgt = checked.ckpt.pos_max_target;
    page.state.pos_max_dft = checked.ckpt.pos_max_draft;

    for (const auto & each : checked.ckpt.checkpoints) {
        auto & to = page.prompt.checkpoints.emplace_back();
        to.update_pos(each.n_tokens, each.pos_min, each.pos_max);
        to.data_tgt  = bytes_of(each.target);
        to.data_dft  = bytes_of(each.draft);
        to.data_spec = bytes_of(each.spec);
    }

    if (checked.lora) {
        unpacked.adapters = std::move(checked.lora->adapters);
    }
    if (checked.draft) {
        unpacked.spec       = bytes_of(checked.draft->spec);
        page.state.dft      = static_cast<uint8_t *>(const_cast<void *>(checked.draft->state.data)); // of the buffer
        page.state.size.dft = checked.draft->state.size;
        page.state.buffer_dft = std::move(*loaded.find(SUFFIX_DFT));
    }

    // last, for it takes the place of the tokens: what a state in memory has before the bytes that are in a file
    unpacked.tokens.resize(n_tokens);
    if (n_tokens > 0) {
        std::memcpy(unpacked.tokens.data(), file + offset_tokens, n_tokens*sizeof(llama_token));
    }

    const size_t n_head = llama_state_seq_data_head(nullptr, 0);

    page.state.tgt      = file + offset_state - n_head;
    page.state.size.tgt = n_file - offset_state + n_head;
    llama_state_seq_data_head(page.state.tgt, n_head);

    page.state.buffer = std::move(*loaded.find(""));

    return {};
}

server_page_result server_page_load(const std::string & dir, server_page_store & store, const server_page_request & request, server_pace pace) {
    const auto & filename = request.name;

    server_page_os_paced os(server_page_os_native(), pace);

    auto page = std::make_shared<server_page>();
    page->unpacked = std::make_unique<server_page_unpacked>();

    // one after another each is charged before it is read
    loaded_files loaded;
    uint64_t     n_bytes   = 0;
    bool         no_memory = false;

    std::function<uint8_t * (const std::string &, uint64_t)> allocate = [&](const std::string & suffix, uint64_t n_bytes_file) -> uint8_t * {
        n_bytes += n_bytes_file;

        page->charge = nullptr;
        page->charge = store.reserve_passing(n_bytes);
        if (!page->charge) {
            return nullptr;
        }
        try {
            if (server_fault("load_allocate")) {
                throw std::bad_alloc();
            }
            return loaded.add(suffix, n_bytes_file);
        } catch (const std::bad_alloc &) {
            no_memory = true;
            return nullptr;
        }
    };

    // another program's may be of any size
    std::vector<std::string> foreign;
    auto done = server_page_foreign_sidecars(os, dir, filename, foreign);
    if (done.ok()) {
        std::vector<std::string> suffixes = server_page_suffixes();
        for (const auto & suffix : foreign) {
            suffixes.erase(std::remove(suffixes.begin(), suffixes.end(), suffix), suffixes.end());
        }
        done = server_page_files(os, dir, GUARD).read(filename, suffixes, allocate);
    }
    if (!done.ok()) {
        auto refused = files_refused(request, done);
        if (refused.reason == SERVER_PAGE_REASON_CEILING) {
            page->charge = nullptr;
            refused = no_memory ?
                server_page_refused(request, SERVER_PAGE_REASON_NO_MEMORY, "there is no memory for the " + std::to_string(n_bytes) + " bytes of '" + filename + "'",
                        {{"bytes_needed", (int64_t) n_bytes}}) :
                server_page_past_ceiling(store, request, n_bytes);
        }
        return refused;
    }

    auto res = unpack(request, loaded, *page);

    page->n_bytes = page->state.size.total() + page->unpacked->spec.size();
    for (const auto & ckpt : page->prompt.checkpoints) {
        page->n_bytes += ckpt.size();
    }
    store.settle(*page);

    for (const auto & [suffix, n] : loaded.sizes) {
        res.n_bytes_file += n;
    }
    res.held = std::move(page);

    return res;
}
