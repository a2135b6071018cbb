#pragma once

// A file system that tells when a lock is not to be had at once, and waits for it. Where nothing may be changed, it makes no
// file for a lock that is not there.

#include "server-page-os-behind.h"

#include <functional>

struct server_page_os_patient final : server_page_os_behind {
    server_page_os_patient(server_page_os & os, bool may_make, const std::function<void(const path & p)> & tell) :
        server_page_os_behind(os), may_make(may_make), tell(tell) {}

    result lock(const path & p, server_page_os_lock how, handle & held) override {
        if (how != SERVER_PAGE_OS_LOCK_SHARED && how != SERVER_PAGE_OS_LOCK_EXCLUSIVE) {
            return os.lock(p, how, held);
        }

        const auto tried = os.lock(p, how == SERVER_PAGE_OS_LOCK_SHARED ? SERVER_PAGE_OS_LOCK_TRY_SHARED : SERVER_PAGE_OS_LOCK_TRY, held);
        if (tried.status == SERVER_PAGE_OS_BUSY) {
            tell(p);
            return os.lock(p, how, held);
        }
        return tried.status == SERVER_PAGE_OS_NOT_FOUND && may_make ? os.lock(p, how, held) : tried;
    }

private:
    const bool may_make;

    const std::function<void(const path & p)> tell;
};
