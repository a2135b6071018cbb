#include "server-pages.h"

const char * server_page_reason_name(server_page_reason reason) {
    switch (reason) {
        case SERVER_PAGE_REASON_NONE:         return "none";
        case SERVER_PAGE_REASON_BAD_NAME:     return "bad_name";
        case SERVER_PAGE_REASON_BAD_SLOT:     return "bad_slot";
        case SERVER_PAGE_REASON_EMPTY_SLOT:   return "empty_slot";
        case SERVER_PAGE_REASON_UNKNOWN_PAGE: return "unknown_page";
        case SERVER_PAGE_REASON_CEILING:      return "page_ceiling";
        case SERVER_PAGE_REASON_TOO_LARGE:    return "too_large";
        case SERVER_PAGE_REASON_MISMATCH:     return "page_mismatch";
        case SERVER_PAGE_REASON_MEDIA_HELD:   return "media_held";
        case SERVER_PAGE_REASON_RUNNING:      return "request_waiting";
        case SERVER_PAGE_REASON_FAILED:       return "page_failed";
    }
    return "unknown";
}

int server_page_reason_status(server_page_reason reason) {
    switch (reason) {
        case SERVER_PAGE_REASON_NONE:         return 200;
        case SERVER_PAGE_REASON_BAD_NAME:
        case SERVER_PAGE_REASON_BAD_SLOT:
        case SERVER_PAGE_REASON_EMPTY_SLOT:   return 400;
        case SERVER_PAGE_REASON_UNKNOWN_PAGE: return 404;
        case SERVER_PAGE_REASON_CEILING:      return 503;
        case SERVER_PAGE_REASON_FAILED:       return 500;
        default:                              return 409;
    }
}
