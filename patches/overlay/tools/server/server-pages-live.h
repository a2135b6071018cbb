#pragma once

// The page verbs on the running server. See server-pages.h for what they are asked and answer.

#include "server-checkpoints.h"
#include "server-common.h"
#include "server-page-identity.h"
#include "server-page-store.h"
#include "server-pages.h"
#include "server-slot-page.h"
#include "server-task.h"

#include "common.h"
#include "speculative.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

struct server_context_impl;
struct server_slot;

// what was read from files and is made into a prompt and a speculative state by the thread that has the model
struct server_page_unpacked {
    std::vector<llama_token> tokens; // as server_tokens::serialize() writes them
    std::vector<uint8_t>     spec;

    // by fingerprint; nullopt: the files do not say
    std::optional<std::vector<std::pair<std::string, float>>> adapters;

    bool has_ckpt = false; // else nothing is known but the state and its tokens
    bool done     = false; // prompt and speculative state are made

    std::vector<server_page_loss> losses;
};

// a conversation outside the slots: it can be put into any slot that can hold it
struct server_page final : server_page_base {
    server_slot_page state;
    server_prompt    prompt; // tokens and context checkpoints

    common_speculative_seq_state          spec;
    std::vector<common_adapter_lora_info> lora;

    size_t  n_bytes_spec = 0;
    int64_t t_created_us = 0;

    server_page_identity made_for;

    std::unique_ptr<server_page_unpacked> unpacked; // of a page that was read from files

    bool parked  = false; // by a reconfigure, which places it back; its slot is kept beside it
    bool running = false; // its request has not ended
};

// for the thread that runs the slots, the store apart
struct server_pages_live {
    explicit server_pages_live(server_context_impl & srv);

    server_page_store store;

    void on_load(); // the model was loaded
    void on_task(server_task && task);

    void publish(); // the list of pages, after it has changed

    // what a page of now is good for
    server_page_identity identity() const;

    void count_ended(const std::string & action, const server_page_result & result); // any thread, after all steps

private:
    server_context_impl & srv;

    server_loaded_files files;

    server_page_result measure(const server_slot & slot, const server_page_request & request) const;
    server_page_result out    (server_slot & slot, const server_page_request & request);
    server_page_result copy   (server_slot & slot, const server_page_request & request);
    server_page_result in     (server_slot & slot, const server_page_request & request);
    server_page_result drop   (const server_page_request & request);
    server_page_result hold   (const server_page_request & request);

    std::shared_ptr<server_page> find(const server_page_request & request, server_page_result & refused) const;
    std::shared_ptr<server_page> find(const server_slot & slot, const server_page_request & request, server_page_result & refused) const;

    bool is_decoding() const;

    bool capture (server_slot & slot, server_page & page, server_page_result & res);
    bool admitted(const server_slot & slot, const server_page & page, const server_page_request & request, server_page_result & refused) const;
    bool unpack  (server_page & page, const server_page_request & request, server_page_result & refused) const;

    void    add_unseen  (const server_page & page, server_page_result & res) const;
    void    put_adapters(server_slot & slot, const server_page & page) const;
    int64_t n_cells_before(const server_slot & slot) const;
    int64_t n_reusable(const server_slot & slot) const;

    void answer(int id_task, const server_page_request & request, server_page_result && result);
};

// the budget of context checkpoints over all slots, for the thread that runs them
struct server_checkpoints_live {
    explicit server_checkpoints_live(server_context_impl & srv);

    size_t limit = 0; // bytes, 0: none

    // room for a checkpoint that is about to be made, false: skip it
    bool admit(server_slot & slot);

    // after checkpoints have come with a state, `newcomer` is the slot that they came to
    void enforce(const server_slot * newcomer = nullptr);

    size_t n_bytes() const;

private:
    server_context_impl & srv;

    std::vector<std::vector<size_t>> sizes() const;
    void give_up(const server_checkpoints_plan & plan);
};
