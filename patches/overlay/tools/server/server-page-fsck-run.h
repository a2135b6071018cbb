#pragma once

// What fsck and gc of a directory share: how they tell, the lock, and what was interrupted.

#include "server-page-commit.h"
#include "server-page-fsck.h"
#include "server-page-os-patient.h"

#include <set>

struct server_page_fsck_run {
    typedef server_page_files_result  result;
    typedef server_page_os_path       path;
    typedef server_page_os_handle_ptr handle;

    server_page_fsck_run(server_page_os & os, const std::string & dir, const server_page_fsck_options & options, const server_page_tell & tell);

    const std::string                dir;
    const server_page_fsck_options & options;
    const server_page_tell &         tell_user;
    const server_page_guard          guard;

    server_page_os_patient os;

    server_page_fsck_status status = SERVER_PAGE_FSCK_OK;

    void tell(const server_page_finding & finding);

    // true: it is not done, and that was told; once, if it is met again
    bool failed(const std::string & name, const result & res);

    // shared: with none where there is no file for it, which a dry run does not make
    result lock(bool exclusive, handle & held);

    // false: the directory cannot be read
    bool list(std::vector<server_page_generation> & generations);

    // completes and sweeps what was interrupted of a name; tells_of_damage: of a commit record that is damaged
    void recover(const std::string & name, bool tells_of_damage);

private:
    std::set<std::string> told_failures;

    bool told_wait = false;
};
