#pragma once

// The HTTP edge of a reconfigure: the request body into a typed request, typed answers into JSON.

#include "server-common.h"
#include "server-live-info.h"
#include "server-reconfigure.h"

#include <string>

// throws std::invalid_argument that names the field and what was wrong with it
server_geometry_request server_reconfigure_parse(const std::string & body);

// the receipt, or the body of an error
json server_reconfigure_to_json(const server_reconfigure_result & result);

// the HTTP status of that answer
int server_reconfigure_status(const server_reconfigure_result & result);

json server_geometry_to_json(const server_geometry & geometry);

// the answer to a body that is no request
json server_reconfigure_bad_request(const std::string & message);

// parked states, for /props and for /pages
json server_live_parked_to_json(const server_live_info & live);
json server_live_pages_to_json (const server_live_info & live, int64_t t_now_us);

// Prometheus text, to be added to the rest of /metrics
struct server_live_gauges {
    int64_t n_cells_used        = 0;
    int64_t n_bytes_pages       = 0;
    int64_t n_bytes_checkpoints = 0;
    bool    is_quiet            = false;
};

std::string server_live_to_metrics(const server_live_info & live, const server_live_gauges & gauges);
