#pragma once

// Publication of a page's files as one generation.
//
// A page is up to four files of one directory: NAME, NAME.ckpt, NAME.lora, NAME.dft. There is a page where there is NAME.
// Whatever happens at whatever moment (an error of the disk, a crash, a loss of power), a reader finds all files of the old
// generation, or all of the new one, or gets an error that says what is wrong. It never finds some of each.
//
//   .page-lock                        held shared by who reads, exclusively by who commits, removes, recovers or
//                                     makes a stage; not while the big files are written
//   NAME.page-staging/                there only while something is under way, or was when somebody died
//       PID-N/                        a stage, of one publication
//           .lock                     locked for as long as its owner lives: a pid alone proves nothing, it is used
//                                     again and means another process in another container
//           NAME, NAME.ckpt, ...      the new generation
//       commit                        the record: from here on the new generation is the one that counts
//
// publish():
//   1. a stage is made, the files are written into it and synced, and every directory up to here
//   2. under the lock: what an earlier crash left of this name is completed or swept
//   3. the record is written beside its place, synced, renamed to `commit`; the directory is synced
//   4. the files are moved over the old ones, sidecars that the new generation lacks are removed; the directory is synced
//   5. the record is dropped, and that is synced. This last sync may fail with no more than a warning: a record that comes
//      back lists what is in place already, and completing it again changes nothing.
//   6. the stage is removed, and the staging directory where it is empty
//
// A failure before the record leaves the old generation and no stage. After it, whoever next reads or writes the name takes
// up at step 4, each part of which may have been done already. A record that cannot be read, or that lists what is not
// there, is reported and left as it is: nothing is guessed. publish() and read() refuse such a name, remove() clears it.
//
// remove() needs no record, so that it works on a full disk: NAME is removed and that is synced, then the sidecars.
//
// The locks are advisory: other programs that write these names are not kept out. They are not fair either: readers that
// never leave a gap hold up who commits.

#include "server-page-checksum.h"
#include "server-page-file-name.h"
#include "server-page-os.h"

#include <functional>
#include <string>
#include <vector>

struct server_page_file {
    std::string suffix; // "", ".ckpt", ".lora" or ".dft"

    std::vector<server_page_span> parts; // its contents, one after another
};

enum server_page_files_status {
    SERVER_PAGE_FILES_OK,        // a message beside it is a warning
    SERVER_PAGE_FILES_NOT_FOUND, // there is no such page, or no such directory
    SERVER_PAGE_FILES_BAD_NAME,  // or files that make no page
    SERVER_PAGE_FILES_DECLINED,  // the reader did not want that much
    SERVER_PAGE_FILES_NO_SPACE,
    SERVER_PAGE_FILES_NO_ACCESS,
    SERVER_PAGE_FILES_CORRUPT,   // the record, or what it lists
    SERVER_PAGE_FILES_IO,        // anything else the operating system said; a symlink that stands in the way
    SERVER_PAGE_FILES_PENDING,   // publish: the record may be placed, the rest failed. The next read or write of the name
                                 // completes the new generation, or finds the old one if the record was lost
};

struct server_page_files_result {
    server_page_files_status status = SERVER_PAGE_FILES_OK;

    std::string message; // what was tried, on which file, what came back

    bool ok() const { return status == SERVER_PAGE_FILES_OK; }
};

struct server_page_generation {
    struct file {
        std::string suffix;
        uint64_t    n_bytes = 0;
    };

    std::string name;

    std::vector<file> files; // none with the suffix "": what an interrupted removal left

    bool pending = false; // there is a record: recover() changes the files
};

struct server_page_files {
    // the directory must be there when something is published
    server_page_files(server_page_os & os, const std::string & dir);

    // all or nothing, in place of the generation of that name if there is one; one of the files must be NAME itself
    server_page_files_result publish(const std::string & name, const std::vector<server_page_file> & files);

    // one generation: `allocate` is called for every one of the suffixes of which there is a file, before any contents are
    // read; it returns n_bytes of memory, or nullptr where that is more than the caller wants. It must not call back into
    // this. No memory is needed for an empty file. A publication that was interrupted after its record is completed first.
    server_page_files_result read(const std::string & name, const std::vector<std::string> & suffixes,
            const std::function<uint8_t * (const std::string & suffix, uint64_t n_bytes)> & allocate);

    // the whole generation, stages that nobody owns any more, and a record that cannot be completed
    server_page_files_result remove(const std::string & name);

    // complete publications that have a record, sweep stages whose owner is dead; `done` tells what was or would be done
    // goes on past a name that fails; the first failure is returned
    server_page_files_result recover(bool dry_run, std::vector<std::string> & done);

    // in the order of their names
    server_page_files_result list(std::vector<server_page_generation> & generations);

private:
    server_page_os & os;

    const std::string dir;
};
