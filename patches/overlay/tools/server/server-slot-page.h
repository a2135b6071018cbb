#pragma once

// The one mover of a sequence's state: what it holds in the target and in the draft context, into host memory and back.

#include "server-pace.h"

#include "llama.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// of the state as it is kept by name and in files; clients see it in /props
constexpr int SERVER_SLOT_PAGE_VERSION = 1;

// one sequence of a target context and, where there is one, of its draft context
struct server_seq_ref {
    llama_context * ctx_tgt = nullptr;
    llama_context * ctx_dft = nullptr;

    llama_seq_id id = -1;
};

struct server_slot_page_size {
    size_t tgt = 0;
    size_t dft = 0;

    size_t total() const { return tgt + dft; }
};

// host memory for a state: kept when it is large enough, and not filled with zeros first
struct server_slot_page_buffer {
    uint8_t * data() const { return ptr.get(); }
    size_t    size() const { return n; }

    // at least n_bytes, the content is lost; throws std::bad_alloc
    void reserve(size_t n_bytes);

    // make the memory resident, so that the copy into it does not wait for page faults
    void touch(server_pace pace = server_pace(false));

private:
    struct free_aligned {
        void operator()(uint8_t * data) const;
    };

    std::unique_ptr<uint8_t, free_aligned> ptr;
    size_t n = 0;
};

// the state of one sequence, without the sequence id: it can be put into any slot of any context of the same model and KV types
struct server_slot_page {
    server_slot_page_buffer buffer;
    server_slot_page_buffer buffer_dft; // only of a state that was read from files, which are read into one buffer each

    // where the bytes of each context are: in the first buffer one behind the other, unless they were read from files
    uint8_t * tgt = nullptr;
    uint8_t * dft = nullptr;

    server_slot_page_size size;

    // the last position in each context, -1 where it holds nothing
    llama_pos pos_max_tgt = -1;
    llama_pos pos_max_dft = -1;
};

// bytes that a capture with these flags takes
server_slot_page_size server_slot_page_measure(const server_seq_ref & src, llama_state_seq_flags flags);

// copy a sequence's state into memory of the caller that holds `size`, as it was measured; the sequence is left as it is
// memory work that is still queued for the sequence is applied first
// returns false and says why where the state could not be read whole
bool server_slot_page_read(
        const server_seq_ref & src, llama_state_seq_flags flags,
        uint8_t * tgt, uint8_t * dft, const server_slot_page_size & size, std::string & error);

// put a state into a sequence, whatever that held before
// returns false and says why where it does not arrive whole; the sequence is empty in both contexts then
bool server_slot_page_write(
        const server_seq_ref & dst, llama_state_seq_flags flags,
        const uint8_t * tgt, const uint8_t * dft, const server_slot_page_size & size, std::string & error);

// the same into and out of a page, which also remembers the positions and has the restored ones held against them
bool server_slot_page_capture(const server_seq_ref & src, llama_state_seq_flags flags, server_slot_page & page, std::string & error);
bool server_slot_page_restore(const server_slot_page & page, const server_seq_ref & dst, llama_state_seq_flags flags, std::string & error);
