// SPDX-License-Identifier: GPL-2.0
/*
 * Test double of the NVIDIA kernel driver, for PCI functions that show an NVIDIA id and have no such hardware.
 *
 * Like the driver: a PCI driver named `nvidia` for display functions, character major 195, minors given first-free at
 * probe, /proc/driver/nvidia/{version,params,gpus/<address>/information}, -ENODEV at load when it was given no card,
 * and an unbind that waits for as long as a process holds the card open. Unlike it: nothing is computed.
 */
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define NV_MAJOR 195
#define NV_CONTROL 255
#define NV_CARDS 248

struct card {
	struct pci_dev *pdev;
	struct proc_dir_entry *folder;
	atomic_t users;
	int minor;
};

static DEFINE_IDA(minors);
static DEFINE_MUTEX(lock);
static struct card *cards[NV_CARDS];
static struct proc_dir_entry *top, *gpus;
static int bound;

/* What nvidia-uvm asks for, so that loading it loads this module first. */
int nvidia_cards(void)
{
	return bound;
}
EXPORT_SYMBOL_GPL(nvidia_cards);

static int nv_open(struct inode *inode, struct file *file)
{
	int minor = iminor(inode), status = 0;

	if (minor == NV_CONTROL)
		return 0;
	mutex_lock(&lock);
	if (minor < NV_CARDS && cards[minor])
		atomic_inc(&cards[minor]->users);
	else
		status = -ENODEV;
	mutex_unlock(&lock);
	return status;
}

static int nv_release(struct inode *inode, struct file *file)
{
	int minor = iminor(inode);

	if (minor < NV_CARDS && cards[minor])
		atomic_dec(&cards[minor]->users);
	return 0;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = nv_open, .release = nv_release };

static int information_show(struct seq_file *out, void *unused)
{
	struct card *card = out->private;
	struct pci_dev *p = card->pdev;

	seq_puts(out, "Model: \t\t NVIDIA Test Double\n");
	seq_printf(out, "IRQ:   \t\t %u\n", p->irq);
	seq_printf(out, "GPU UUID: \t GPU-00000000-0000-0000-0000-%04x%02x%02x%04x\n", pci_domain_nr(p->bus),
		   p->bus->number, p->devfn, p->device);
	seq_puts(out, "Video BIOS: \t ??.??.??.??.??\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n");
	seq_printf(out, "DMA Mask: \t 0x7fffffffffff\nBus Location: \t %s\nDevice Minor: \t %d\n", pci_name(p),
		   card->minor);
	seq_puts(out, "GPU Firmware: \t " NV_VERSION "\nGPU Excluded:\t No\n");
	return 0;
}

static int version_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " NV_VERSION "  Release Build\n");
	seq_puts(out, "GCC version:  gcc version " __VERSION__ " (test double)\n");
	return 0;
}

static int params_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n");
	return 0;
}

static int nv_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct card *card = kzalloc(sizeof(*card), GFP_KERNEL);

	if (!card)
		return -ENOMEM;
	card->minor = ida_alloc_max(&minors, NV_CARDS - 1, GFP_KERNEL);
	if (card->minor < 0) {
		int status = card->minor;

		kfree(card);
		return status;
	}
	card->pdev = pdev;
	card->folder = proc_mkdir(pci_name(pdev), gpus);
	proc_create_single_data("information", 0444, card->folder, information_show, card);
	pci_set_drvdata(pdev, card);
	mutex_lock(&lock);
	cards[card->minor] = card;
	bound++;
	mutex_unlock(&lock);
	return 0;
}

static void nv_remove(struct pci_dev *pdev)
{
	struct card *card = pci_get_drvdata(pdev);

	if (atomic_read(&card->users))
		pr_err("NVRM: Attempting to remove device %s with non-zero usage count!\n", pci_name(pdev));
	/* Without an end, as the driver does: whoever unbinds a card in use hangs. */
	while (atomic_read(&card->users))
		msleep(100);
	mutex_lock(&lock);
	cards[card->minor] = NULL;
	bound--;
	mutex_unlock(&lock);
	proc_remove(card->folder);
	ida_free(&minors, card->minor);
	kfree(card);
}

static const struct pci_device_id ids[] = {
	{ .vendor = 0x10de, .device = PCI_ANY_ID, .subvendor = PCI_ANY_ID, .subdevice = PCI_ANY_ID,
	  .class = PCI_BASE_CLASS_DISPLAY << 16, .class_mask = 0xff0000 },
	{}
};
MODULE_DEVICE_TABLE(pci, ids);
static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = nv_probe, .remove = nv_remove };

static int __init nv_init(void)
{
	struct pci_dev *pdev = NULL;
	int missed = 0, status = register_chrdev(NV_MAJOR, "nvidia", &operations);

	if (status)
		return status;
	top = proc_mkdir("driver/nvidia", NULL);
	gpus = proc_mkdir("gpus", top);
	proc_create_single("version", 0444, top, version_show);
	proc_create_single("params", 0444, top, params_show);
	status = pci_register_driver(&driver);
	if (status)
		goto undo;
	for_each_pci_dev(pdev)
		if (pci_match_id(ids, pdev) && pdev->driver != &driver)
			missed++;
	if (missed)
		pr_warn("NVRM: The NVIDIA probe routine was not called for %d device(s).\n", missed);
	if (bound)
		return 0;
	pr_err("NVRM: No NVIDIA devices probed.\n");
	pci_unregister_driver(&driver);
	status = -ENODEV;
undo:
	proc_remove(top);
	unregister_chrdev(NV_MAJOR, "nvidia");
	return status;
}

static void __exit nv_exit(void)
{
	pci_unregister_driver(&driver);
	proc_remove(top);
	unregister_chrdev(NV_MAJOR, "nvidia");
}

module_init(nv_init);
module_exit(nv_exit);
MODULE_LICENSE("GPL");
MODULE_VERSION(NV_VERSION);
MODULE_DESCRIPTION("Test double of the NVIDIA driver");
