#pragma once

// The page verbs on the running server. See server-pages.h for what they are asked and answer.

#include "server-common.h"
#include "server-page-store.h"
#include "server-pages.h"
#include "server-slot-page.h"
#include "server-task.h"

#include "common.h"
#include "speculative.h"

#include <memory>
#include <string>
#include <vector>

struct server_context_impl;
struct server_slot;

// a conversation outside the slots: it can be put into any slot that can hold it
struct server_page final : server_page_base {
    server_slot_page state;
    server_prompt    prompt; // tokens and context checkpoints

    common_speculative_seq_state          spec;
    std::vector<common_adapter_lora_info> lora;

    size_t  n_bytes_spec = 0;
    int64_t t_created_us = 0;

    std::string made_for; // see server_pages_live::made_for()

    bool parked  = false; // by a reconfigure, which places it back; its slot is kept beside it
    bool running = false; // its request has not ended
};

// for the thread that runs the slots, the store apart
struct server_pages_live {
    explicit server_pages_live(server_context_impl & srv);

    server_page_store store;

    void on_task(server_task && task);

    void publish(); // the list of pages, after it has changed

    // what a page is good for: the model that is loaded, its draft and the types of the KV cache, never the geometry
    std::string made_for() const;

private:
    server_context_impl & srv;

    server_page_result measure (const server_page_request & request);
    server_page_result page_out(const server_page_request & request);
    server_page_result page_in (const server_page_request & request);
    server_page_result drop    (const server_page_request & request);

    int64_t n_reusable(const server_slot & slot) const;

    void count(const server_page_request & request, const server_page_result & result);
};
