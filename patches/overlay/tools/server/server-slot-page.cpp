#include "server-slot-page.h"

#include "server-memory.h"

#include <exception>
#include <new>

// of a huge page: fewer faults, and faster copies
static constexpr std::align_val_t ALIGNMENT { 2*1024*1024 };

void server_slot_page_buffer::free_aligned::operator()(uint8_t * data) const {
    ::operator delete(data, ALIGNMENT);
}

void server_slot_page_buffer::reserve(size_t n_bytes) {
    if (n_bytes <= n) {
        return;
    }

    ptr.reset();
    n = 0;

    // the system gives more than it has, and kills who then uses it
    const int64_t n_bytes_left = server_memory_available();
    if (n_bytes_left > 0 && n_bytes > (uint64_t) n_bytes_left) {
        throw std::bad_alloc();
    }

    ptr.reset(static_cast<uint8_t *>(::operator new(n_bytes, ALIGNMENT)));
    n = n_bytes;

    server_memory_prefer_huge_pages(ptr.get(), n);
}

void server_slot_page_buffer::touch(server_pace pace) {
    const size_t page_size = 4096; // the smallest page there is: a larger one is touched more than once

    pace.in_pieces(n, [&](size_t offset, size_t n_bytes) {
        for (size_t i = offset; i < offset + n_bytes; i += page_size) {
            static_cast<volatile uint8_t *>(ptr.get())[i] = 0;
        }
        return true;
    });
}

static llama_pos pos_max(llama_context * ctx, llama_seq_id id) {
    auto * mem = ctx ? llama_get_memory(ctx) : nullptr;

    return mem ? llama_memory_seq_pos_max(mem, id) : -1;
}

// a context without a memory module (an encoder) holds no sequence state
static size_t state_size(llama_context * ctx, llama_seq_id id, llama_state_seq_flags flags) {
    return ctx && llama_get_memory(ctx) ? llama_state_seq_get_size_ext(ctx, id, flags) : 0;
}

server_slot_page_size server_slot_page_measure(const server_seq_ref & src, llama_state_seq_flags flags) {
    return {
        /*.tgt =*/ state_size(src.ctx_tgt, src.id, flags),
        /*.dft =*/ state_size(src.ctx_dft, src.id, flags),
    };
}

static void clear(llama_context * ctx, llama_seq_id id) {
    auto * mem = ctx ? llama_get_memory(ctx) : nullptr;
    if (mem) {
        llama_memory_seq_rm(mem, id, -1, -1);
    }
}

// a copy between streams or a position shift that is only queued would be missing from the state, without a sign of it
static bool flush(const server_seq_ref & src, std::string & error) {
    if (llama_memory_flush(src.ctx_tgt) && (!src.ctx_dft || llama_memory_flush(src.ctx_dft))) {
        return true;
    }

    error = "queued work on the KV cache could not be done";
    return false;
}

static bool read_one(llama_context * ctx, llama_seq_id id, llama_state_seq_flags flags, uint8_t * dst, size_t size) {
    return size == 0 || (ctx && llama_state_seq_get_data_ext(ctx, dst, size, id, flags) == size);
}

// a read of libllama that fails or ends early leaves part of the state in place, so only the exact size counts as success
static bool write_one(llama_context * ctx, llama_seq_id id, llama_state_seq_flags flags, const uint8_t * src, size_t size) {
    return size == 0 || (ctx && llama_state_seq_set_data_ext(ctx, src, size, id, flags) == size);
}

bool server_slot_page_read(
        const server_seq_ref & src, llama_state_seq_flags flags,
        uint8_t * tgt, uint8_t * dft, const server_slot_page_size & size, std::string & error) {
    try {
        if (!flush(src, error)) {
            return false;
        }
        if (!read_one(src.ctx_tgt, src.id, flags, tgt, size.tgt)) {
            error = "the target's state could not be read";
            return false;
        }
        if (!read_one(src.ctx_dft, src.id, flags, dft, size.dft)) {
            error = "the draft's state could not be read";
            return false;
        }
    } catch (const std::exception & e) {
        error = e.what();
        return false;
    }

    return true;
}

bool server_slot_page_write(
        const server_seq_ref & dst, llama_state_seq_flags flags,
        const uint8_t * tgt, const uint8_t * dft, const server_slot_page_size & size, std::string & error) {
    // the cells of an earlier state would stay beside those of an empty one
    clear(dst.ctx_tgt, dst.id);
    clear(dst.ctx_dft, dst.id);

    try {
        if (!write_one(dst.ctx_tgt, dst.id, flags, tgt, size.tgt)) {
            error = "the target's state does not fit or is damaged";
        } else if (!write_one(dst.ctx_dft, dst.id, flags, dft, size.dft)) {
            error = "the draft's state does not fit or is damaged";
        } else {
            return true;
        }
    } catch (const std::exception & e) {
        error = e.what();
    }

    clear(dst.ctx_tgt, dst.id);
    clear(dst.ctx_dft, dst.id);

    return false;
}

bool server_slot_page_capture(const server_seq_ref & src, llama_state_seq_flags flags, server_slot_page & page, std::string & error) {
    try {
        page.size = server_slot_page_measure(src, flags);
        page.buffer.reserve(page.size.total());
    } catch (const std::exception & e) {
        error = e.what();
        return false;
    }

    page.tgt = page.buffer.data();
    page.dft = page.buffer.data() + page.size.tgt;

    page.pos_max_tgt = pos_max(src.ctx_tgt, src.id);
    page.pos_max_dft = pos_max(src.ctx_dft, src.id);

    return server_slot_page_read(src, flags, page.tgt, page.dft, page.size, error);
}

bool server_slot_page_restore(const server_slot_page & page, const server_seq_ref & dst, llama_state_seq_flags flags, std::string & error) {
    if (!server_slot_page_write(dst, flags, page.tgt, page.dft, page.size, error)) {
        return false;
    }

    const bool same_tgt = page.size.tgt == 0 || pos_max(dst.ctx_tgt, dst.id) == page.pos_max_tgt;
    const bool same_dft = page.size.dft == 0 || pos_max(dst.ctx_dft, dst.id) == page.pos_max_dft;
    if (same_tgt && same_dft) {
        return true;
    }

    error = "the state ends at another position than the one that was captured";

    clear(dst.ctx_tgt, dst.id);
    clear(dst.ctx_dft, dst.id);

    return false;
}
