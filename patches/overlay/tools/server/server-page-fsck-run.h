#pragma once

// What fsck and gc of a directory share: how they tell, the lock, and sidecars that belong to nothing.

#include "server-page-commit.h"
#include "server-page-fsck.h"

static const char * const SERVER_PAGE_QUARANTINE = ".quarantine";
static const char * const SERVER_PAGE_WHY        = "why.txt";

struct server_page_fsck_run {
    typedef server_page_files_result  result;
    typedef server_page_os_path       path;
    typedef server_page_os_handle_ptr handle;

    server_page_os & os;

    const std::string                dir;
    const server_page_fsck_options & options;
    const server_page_tell &         tell_user;

    const path root       = { dir, "" };
    const path quarantine = root / SERVER_PAGE_QUARANTINE;

    server_page_fsck_status status = SERVER_PAGE_FSCK_OK;

    void tell(const server_page_finding & finding);

    // true: it is not done, and that was told
    bool failed(const std::string & name, const result & res);

    result lock(bool exclusive, handle & held);

    // completes and sweeps what was interrupted, then lists; false: the directory cannot be read
    // tells_of_damage: of a commit record that is damaged
    bool list_recovered(std::vector<server_page_generation> & generations, bool tells_of_damage);

    // sidecars without FILE, of which nothing is under way; ours are removed where `removes`
    void check_orphans(const server_page_generation & generation, bool removes);

    // the begin of a file, or all of it
    result read_file(const path & p, std::vector<uint8_t> & data, bool & found, uint64_t n_bytes_max = UINT64_MAX) const;
};

// a page, and not only sidecars
bool server_page_has_state(const server_page_generation & generation);
