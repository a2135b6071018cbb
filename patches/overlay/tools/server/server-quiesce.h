#pragma once

// What POST /quiesce is asked and answers: a server that is quiet starts no request, and ends none unless told to.

#include "server-common.h"

#include <string>

struct server_quiesce_request {
    bool is_quiet = false;
    bool cut      = false; // end the requests in progress too, their slots keep what they hold
};

// counted in tasks: a request with several prompts or choices is one for each that has a slot, and one for each prompt that waits
struct server_quiesce_result {
    bool is_quiet = false;

    int n_processing = 0; // in progress, parked ones among them
    int n_parked     = 0; // in progress, but waiting for a geometry that has a place for them
    int n_waiting    = 0; // held until the server is not quiet any more
    int n_cut        = 0;

    json to_json() const;
};

// throws std::invalid_argument that names the field and what was wrong with it
server_quiesce_request server_quiesce_parse(const std::string & body);
